"""Rows of public chat files to conversations in the one form that chat templates take.

The format is found by looking at the row. Turns are never dropped, invented or given a role by guess: a row that is
not understood is rejected with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tasks.data.messages import Message, normalize_message, normalize_tools
from tasks.data.rejection import RejectReason, RowRejected


class ChatFormat(StrEnum):
    """How a row holds its conversation."""

    MESSAGES = "messages"  # a list of {role, content}
    SHAREGPT = "sharegpt"  # a list of {from, value}
    ALPACA = "alpaca"  # instruction, input, output
    SELF_INSTRUCT = "self_instruct"  # instruction, several {input, output}
    PROMPT_COMPLETION = "prompt_completion"  # one text, or list of messages, each


@dataclass(frozen=True)
class Conversation:
    """One conversation, normalized."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    origin: str = "data"  # "greedy": the answers are the target's own greedy ones
    trained: list[bool] = field(default_factory=list)  # per message: may this turn be supervised?


_MESSAGE_LISTS = ("messages", "conversations", "conversation", "traj", "history")
_PROMPTS = ("prompt", "question", "query", "instruction", "turns")
_ANSWERS = ("completion", "response", "answer", "output", "chosen")
_MAXIMUM_KEYS_SHOWN = 12


def detect_format(row: dict[str, Any]) -> ChatFormat:
    """The format of a row.

    Raises:
        RowRejected: `unknown_format`, naming the row's fields; `no_answer` where there is a prompt and nothing else.
    """
    if name := _message_list(row):
        first = row[name][0]
        return ChatFormat.SHAREGPT if isinstance(first, dict) and "from" in first else ChatFormat.MESSAGES
    if isinstance(row.get("instruction"), str):
        if isinstance(row.get("instances"), list):
            return ChatFormat.SELF_INSTRUCT
        if "output" in row or "response" in row:
            return ChatFormat.ALPACA
    if _first_of(row, _PROMPTS) and _first_of(row, _ANSWERS):
        return ChatFormat.PROMPT_COMPLETION
    raise _not_recognised(row)


def _not_recognised(row: dict[str, Any]) -> RowRejected:
    keys = ", ".join(list(row)[:_MAXIMUM_KEYS_SHOWN])
    for name in _MESSAGE_LISTS:
        if row.get(name) == []:
            return RowRejected(RejectReason.NO_ANSWER, f"field {name!r} is an empty list")
        if isinstance(row.get(name), list):
            detail = f"the items of field {name!r} have no 'role' (nor 'from'): write them as messages"
            return RowRejected(RejectReason.UNKNOWN_FORMAT, detail)
    if "replies" in row or isinstance(row.get("prompt"), dict):
        detail = 'a tree of messages: write each path from the root as a row {"messages": [...]}'
        return RowRejected(RejectReason.UNKNOWN_FORMAT, detail)
    if prompt := _first_of(row, _PROMPTS):
        return RowRejected(
            RejectReason.NO_ANSWER,
            f"field {prompt!r} is a prompt, and none of {', '.join(_ANSWERS)} answers it (fields: {keys})",
        )
    return RowRejected(
        RejectReason.UNKNOWN_FORMAT,
        f"fields {keys}; expected messages, conversations, instruction and output, or prompt and completion",
    )


def parse_row(row: dict[str, Any], chat_format: ChatFormat | None = None) -> list[Conversation]:
    """The conversations of one row (in the format found, if none is given): one, but for rows with several answers.

    Raises:
        RowRejected: with the reason and what was found.
    """
    chat_format = chat_format or detect_format(row)
    tools = normalize_tools(row.get("tools", row.get("functions")))
    origin = "greedy" if row.get("origin") == "greedy" else "data"
    conversations = []
    for raw in _raw_conversations(row, chat_format):
        messages, trained = _normalize(raw)
        conversations.append(Conversation(messages, tools, origin, trained))
    return conversations


def repair_unicode(value: Any) -> tuple[Any, bool]:
    """Replace lone surrogates, which JSON escapes can hold and UTF-8 cannot, by U+FFFD. Says whether any was there."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        return value, False
    if isinstance(value, list):
        pairs = [repair_unicode(item) for item in value]
        return [item for item, _ in pairs], any(changed for _, changed in pairs)
    if isinstance(value, dict):
        changed = False
        repaired = {}
        for name, item in value.items():
            new_name, name_changed = repair_unicode(name)
            new_item, item_changed = repair_unicode(item)
            changed = changed or name_changed or item_changed
            repaired[new_name] = new_item
        return repaired, changed
    return value, False


def _raw_conversations(row: dict[str, Any], chat_format: ChatFormat) -> list[list[Any]]:
    """Lists of messages as the row has them, roles and contents not yet normalized."""
    system = row.get("system")
    start = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    if chat_format in (ChatFormat.MESSAGES, ChatFormat.SHAREGPT):
        messages = row[_message_list(row) or ""]
        return [(start if _has_no_system(messages) else []) + messages]
    if chat_format is ChatFormat.SELF_INSTRUCT:
        instances = [instance for instance in row["instances"] if isinstance(instance, dict)]
        if not instances:
            raise RowRejected(RejectReason.NO_ANSWER, "field 'instances' holds no {input, output}")
        return [start + _instruction(row["instruction"], i.get("input"), i.get("output")) for i in instances]
    if chat_format is ChatFormat.ALPACA:
        answer = row.get("output", row.get("response"))
        return [start + _history(row) + _instruction(row["instruction"], row.get("input"), answer)]
    prompt, answer = row[_first_of(row, _PROMPTS) or ""], row[_first_of(row, _ANSWERS) or ""]
    return [start + _as_messages(prompt, "user") + _as_messages(answer, "assistant")]


def _instruction(instruction: Any, given: Any, answer: Any) -> list[dict[str, Any]]:
    prompt = f"{instruction}\n{given}" if isinstance(given, str) and given.strip() else instruction
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _history(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier turns of an Alpaca row: a list of [question, answer]."""
    history = row.get("history") or []
    if not isinstance(history, list) or any(not isinstance(p, list) or len(p) != 2 for p in history):
        raise RowRejected(RejectReason.UNKNOWN_FORMAT, "field 'history' is not a list of [question, answer]")
    return [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _as_messages(value: Any, role: str) -> list[Any]:
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return value
    return [{"role": role, "content": value}]


def _normalize(raw: Sequence[Any]) -> tuple[list[Message], list[bool]]:
    messages: list[Message] = []
    trained: list[bool] = []
    for index, item in enumerate(raw):
        message, weight = normalize_message(item, index)
        if message["role"] == "user" and messages and messages[-1]["role"] == "user":
            raise RowRejected(
                RejectReason.CONSECUTIVE_USER_TURNS,
                f"messages {index - 1} and {index} (from 0) are both the user's: is one a mislabelled answer?",
            )
        messages.append(message)
        trained.append(message["role"] == "assistant" and weight)
    if not any(message["role"] == "assistant" and _says_something(message) for message in messages):
        raise RowRejected(RejectReason.NO_ANSWER, f"{len(messages)} messages, none of them an assistant's with content")
    return messages, trained


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _has_no_system(messages: list[Any]) -> bool:
    first = messages[0]
    return not (isinstance(first, dict) and first.get("role", first.get("from")) == "system")


def _message_list(row: dict[str, Any]) -> str | None:
    """Name of the field that holds the messages."""
    for name in _MESSAGE_LISTS:
        value = row.get(name)
        if isinstance(value, list) and value and isinstance(value[0], dict) and {"role", "from"} & set(value[0]):
            return name
    return None


def _first_of(row: dict[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name)), None)
