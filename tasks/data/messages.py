"""One message, tool call or tool schema of a public chat file, in the form of an OpenAI-compatible server's request.

Tool arguments become objects (logs keep them as JSON strings, templates iterate over them), content becomes text, and
only the fields a server passes to the chat template are kept.
"""

from __future__ import annotations

import json
from typing import Any

from tasks.data.rejection import RejectReason, RowRejected

Message = dict[str, Any]  # role, content (str), and where present reasoning_content, tool_calls, name, tool_call_id

_ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt", "ai", "function_call", "tool_call"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "tool_response", "ipython"),
}
ROLE_ALIASES = {alias: role for role, aliases in _ROLES.items() for alias in aliases}
_CALL_ROLES = ("function_call", "tool_call")  # ShareGPT: the whole message is the call
_TEXT_PARTS = ("text", "input_text", "output_text", "tool_result")
_REASONING_PARTS = ("reasoning", "thinking")
_CALL_PARTS = ("tool_call", "tool_calls", "tool_use")
_PART_VALUES = ("text", "value", "thinking", "content", "input")


def normalize_message(raw: Any, index: int) -> tuple[Message, bool]:
    """One message, and whether its own weight lets it be trained on (`loss_weight` or `weight` of 0 does not).

    Raises:
        RowRejected: naming the message by its position, from 0.
    """
    if not isinstance(raw, dict):
        raise RowRejected(RejectReason.UNKNOWN_FORMAT, f"message {index} is a {type(raw).__name__}, not an object")
    given = raw.get("role", raw.get("from"))
    alias = given.lower() if isinstance(given, str) else ""
    role = ROLE_ALIASES.get(alias)
    if role is None:
        raise RowRejected(
            RejectReason.UNKNOWN_ROLE, f"role {given!r} of message {index}; known roles: {', '.join(ROLE_ALIASES)}"
        )
    content = next((raw[name] for name in ("content", "value", "text") if name in raw), None)
    calls = _calls_of(raw, index)
    if alias in _CALL_ROLES and not calls:
        calls, content = normalize_calls(content, index), None
    text, reasoning, part_calls = _flatten(content, index)
    message: Message = {"role": role, "content": text}
    reasoning = next((raw[n] for n in ("reasoning_content", "reasoning") if isinstance(raw.get(n), str)), reasoning)
    if role == "assistant":
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls or part_calls:
            message["tool_calls"] = calls + part_calls
    for name in ("name", "tool_call_id"):
        if role == "tool" and isinstance(raw.get(name), str):
            message[name] = raw[name]
    return message, raw.get("loss_weight", raw.get("weight", 1)) != 0


def normalize_calls(value: Any, index: int) -> list[dict[str, Any]]:
    """Tool calls from an object, a list of them, or either as JSON text; arguments become an object.

    Raises:
        RowRejected: `bad_tool_call`.
    """
    value = _json_value(value, RejectReason.BAD_TOOL_CALL, f"the tool call of message {index}")
    return [_normalize_call(call, index) for call in (value if isinstance(value, list) else [value])]


def normalize_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool schemas as a list of {"type": "function", "function": {...}}; None where there are none.

    Raises:
        RowRejected: `bad_tools`.
    """
    if value is None or value == "" or value == []:
        return None
    value = _json_value(value, RejectReason.BAD_TOOLS, "field 'tools'")
    if value is None:
        return None
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        if not isinstance(tool, dict) or not isinstance(tool.get("function", tool), dict):
            raise RowRejected(RejectReason.BAD_TOOLS, f"a tool is a {type(tool).__name__}, not an object")
        if not isinstance(tool.get("function", tool).get("name"), str):
            raise RowRejected(RejectReason.BAD_TOOLS, f"a tool without a name: {json.dumps(tool)[:120]}")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tools or None


def _calls_of(raw: dict[str, Any], index: int) -> list[dict[str, Any]]:
    if raw.get("tool_calls"):
        return normalize_calls(raw["tool_calls"], index)
    if raw.get("function_call"):
        return normalize_calls(raw["function_call"], index)
    return []


def _normalize_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowRejected(RejectReason.BAD_TOOL_CALL, f"message {index}: a call without a function name")
    arguments = function.get("arguments", function.get("parameters", function.get("input")))
    if arguments is None or arguments == "":
        arguments = {}
    what = f"message {index}: the arguments of {function['name']!r}"
    arguments = _json_value(arguments, RejectReason.BAD_TOOL_CALL, what)
    if not isinstance(arguments, dict):
        raise RowRejected(RejectReason.BAD_TOOL_CALL, f"{what} are a {type(arguments).__name__}, not an object")
    normalized = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **normalized} if isinstance(call.get("id"), str) else normalized


def _flatten(content: Any, index: int) -> tuple[str, str, list[dict[str, Any]]]:
    """Text, reasoning and tool calls of a message's content.

    Raises:
        RowRejected: `unsupported_content`, naming the part: an image cannot be turned into text.
    """
    if content is None:
        return "", "", []
    if isinstance(content, str):
        return content, "", []
    if not isinstance(content, list):
        raise RowRejected(
            RejectReason.UNSUPPORTED_CONTENT, f"the content of message {index} is a {type(content).__name__}, not text"
        )
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            text.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if isinstance(part, dict) and kind in _CALL_PARTS:
            calls += normalize_calls(part if "name" in part else _part_value(part, kind), index)
            continue
        value = _part_value(part, kind) if isinstance(part, dict) else None
        if not isinstance(value, str) or kind not in (*_TEXT_PARTS, *_REASONING_PARTS):
            raise RowRejected(RejectReason.UNSUPPORTED_CONTENT, f"message {index} has a part of type {kind!r}")
        (reasoning if kind in _REASONING_PARTS else text).append(value)
    return "".join(text), "".join(reasoning), calls


def _part_value(part: dict[str, Any], kind: Any) -> Any:
    return part.get(str(kind), next((part[name] for name in _PART_VALUES if part.get(name) is not None), None))


def _json_value(value: Any, reason: RejectReason, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowRejected(reason, f"{what}: not JSON ({error})") from error
