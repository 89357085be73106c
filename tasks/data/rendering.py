"""The target's own chat template, and what it makes the target say.

The mask of a turn comes from two renders, never from searching for markers in text: the prompt that a server would
give the target at that turn (`add_generation_prompt`), and the conversation through that turn. What the second has
beyond the first is what the target says.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from tasks.contract.errors import ConfigurationError, DataError, Problem
from tasks.contract.receipt import canonical_json
from tasks.data.chat_format import Conversation
from tasks.data.messages import Message
from tasks.data.rejection import RejectReason, RowRejected

_RENDER_ERRORS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE_ANSWER = "Qx7Zk"
_PROBE: list[Message] = [{"role": "user", "content": "Name one."}, {"role": "assistant", "content": _PROBE_ANSWER}]
_PROBE_CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"a": 1}}}
_PROBE_TOOLS: list[Message] = [
    *_PROBE[:1],
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "content": "1", "name": "look_up"},
    *_PROBE[1:],
]


@dataclass(frozen=True)
class Span:
    """What the target says in one turn, as characters of a render: from `start` up to, and without, `end`."""

    start: int
    end: int  # after the end-of-turn token
    token: str  # the end-of-turn token; "" where the template writes none


@dataclass(frozen=True)
class RenderedSample:
    """One text to train on, with what the target says in it, in order."""

    text: str
    spans: tuple[Span, ...]
    length: int  # messages rendered


class ChatTemplate:
    """A tokenizer's chat template in one thinking mode."""

    def __init__(self, tokenizer: Any, *, thinking: bool) -> None:
        """Look at what the template does with a probe conversation.

        Raises:
            ConfigurationError: if the tokenizer has no chat template, or is no fast tokenizer (offsets are needed).
            DataError: if the template's render of an answered question does not begin with that of its prompt.
        """
        if not tokenizer.chat_template:
            raise ConfigurationError(
                Problem("target", tokenizer.name_or_path, "a target whose tokenizer has a chat template")
            )
        if not tokenizer.is_fast:
            raise ConfigurationError(
                Problem("target", type(tokenizer).__name__, "a target with a fast tokenizer (a tokenizer.json)")
            )
        self.tokenizer = tokenizer
        self.thinking = thinking
        self.digest = template_digest(tokenizer)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special.update(token for token in (tokenizer.eos_token,) if token)
        self._special = tuple(sorted(special))
        self.has_thinking_modes = self._differs_by_thinking()
        self.inserted = self._inserted_before_answers()
        self._tail, self._end_token = self._after_answers()
        self.end_tokens = {self._end_token, tokenizer.eos_token} - {"", None}

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str:
        """The template's text; with `prompt`, followed by what opens the target's turn.

        Raises:
            RowRejected: `template_error`, with the template's own message.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    enable_thinking=self.thinking,
                )
            )
        except _RENDER_ERRORS as error:
            detail = f"the target's chat template refuses {_roles(messages)}: {type(error).__name__}: {error}"
            raise RowRejected(RejectReason.TEMPLATE_ERROR, detail) from error

    def samples(self, conversation: Conversation, supervise: str) -> tuple[list[RenderedSample], list[RowRejected]]:
        """The texts to train on, and what keeps single turns from being trained on.

        One sample where the renders agree: every turn is then supervised in the render of the last. Where the
        template rewrites history (drops earlier reasoning, say), a turn that stands differently in later renders
        gets a sample of its own, so that no turn is supervised in a context the target cannot have been in.

        Args:
            conversation: normalized.
            supervise: `every_turn` or `last_turn`.

        Raises:
            RowRejected: if the template cannot render the conversation as it is.
        """
        messages = self._as_served(conversation.messages)
        asked = [i for i, m in enumerate(messages) if m["role"] == "assistant" and conversation.trained[i]]
        if supervise == "last_turn":
            asked = [i for i in asked if i == max(j for j, m in enumerate(messages) if m["role"] == "assistant")]
        turns: list[RenderedSample] = []
        lost: list[RowRejected] = []
        for index in asked:
            try:
                turn = self._turn(messages[: index + 1], conversation.tools)
            except RowRejected as error:
                if error.rejection.reason is not RejectReason.CONTROL_TOKEN_IN_ANSWER:
                    raise
                lost.append(error)
                continue
            if turn:
                turns.append(turn)
            else:
                detail = f"assistant message {index} says nothing, or answers nothing"
                lost.append(RowRejected(RejectReason.NO_SUPERVISED_TOKENS, detail))
        samples = _merge(turns)
        if _GENERATION.search(self._source(conversation.tools)):
            self._check_markers(messages, conversation.tools, samples)
        return samples, lost

    def _turn(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> RenderedSample | None:
        """The assistant turn at the end of `messages`; None if the target says nothing in it, or nobody asked."""
        answer = messages[-1]
        if len(messages) == 1:
            return None
        prompt = self.render(messages[:-1], tools, prompt=True)
        text = self.render(messages, tools, prompt=False)
        if not text.startswith(prompt):
            common = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(text))
            raise RowRejected(
                RejectReason.TEMPLATE_REWRITES_PROMPT,
                f"message {len(messages) - 1}: the prompt goes on with {prompt[common : common + 40]!r}, "
                f"the render with the answer with {text[common : common + 40]!r}",
            )
        said = text[len(prompt) :]
        self._check_said(answer, said, len(messages) - 1)
        start = len(prompt)
        reasoning = answer.get("reasoning_content", "").strip()
        if not reasoning or reasoning not in said:
            # An empty block of reasoning that the template itself puts before an answer is not what the target says.
            start += max((len(block) for block in self.inserted if said.startswith(block)), default=0)
        end, token = self._end_of_turn(text)
        if end <= start or not text[start : end - len(token)].strip():
            return None
        self._check_control_tokens(text[start : end - len(token)], len(messages) - 1)
        return RenderedSample(text, (Span(start, end, token),), len(messages))

    def _check_said(self, answer: Message, said: str, index: int) -> None:
        missing = [call["function"]["name"] for call in answer.get("tool_calls", ())]
        missing = [name for name in missing if name not in said]
        if missing:
            raise RowRejected(
                RejectReason.TEMPLATE_ALTERS_ANSWER,
                f"message {index}: the target's template does not render the call of {missing[0]!r} (no tool support)",
            )
        content = answer["content"].strip()
        if content not in said:
            raise RowRejected(
                RejectReason.TEMPLATE_ALTERS_ANSWER,
                f"message {index}: its content ({content[:60]!r} ...) is not in the template's render "
                f"({said[:60]!r} ...)",
            )

    def _end_of_turn(self, text: str) -> tuple[int, str]:
        """Character after the end-of-turn token of the last turn, and that token ("" where there is none)."""
        if text.endswith(self._tail):
            answer = len(text) - len(self._tail)
            return answer + self._tail.find(self._end_token) + len(self._end_token), self._end_token
        # Calls of tools may end in a token of their own.
        stripped = text.rstrip()
        token = max((s for s in self._special if stripped.endswith(s)), key=len, default="")
        return (len(stripped) if token else len(text)), token

    def _after_answers(self) -> tuple[str, str]:
        """What the template writes after a plain answer, and the first special token of it: what the target says to
        end its turn. What follows (a newline, the end of the text) is the template's."""
        _, text = self._probe(_PROBE)
        tail = text[text.index(_PROBE_ANSWER) + len(_PROBE_ANSWER) :]
        found = [(tail.index(token), -len(token), token) for token in self._special if token in tail]
        return tail, min(found)[2] if found else ""

    def _check_control_tokens(self, answer: str, index: int) -> None:
        for token in self.end_tokens:
            if token in answer:
                raise RowRejected(
                    RejectReason.CONTROL_TOKEN_IN_ANSWER,
                    f"message {index}: {token!r} stands inside the answer; the target would have stopped there",
                )

    def _as_served(self, messages: list[Message]) -> list[Message]:
        """The messages as the target's server would have them in this thinking mode."""
        source = self._source(None)
        splits = "reasoning_content" in source and "</think>" in source
        served = []
        for message in messages:
            if message["role"] == "assistant":
                message = self._without_end_token(message)
                message = _split_reasoning(message) if splits else message
            if self.has_thinking_modes and not self.thinking and "reasoning_content" in message:
                message = {name: value for name, value in message.items() if name != "reasoning_content"}
            served.append(message)
        return served

    def _without_end_token(self, message: Message) -> Message:
        """A raw completion may end in its end-of-turn token, which the template writes itself."""
        stripped = message["content"].rstrip()
        for token in self.end_tokens:
            if stripped.endswith(token):
                return {**message, "content": stripped.removesuffix(token)}
        return message

    def _check_markers(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, samples: list[RenderedSample]
    ) -> None:
        """Hold the spans against the template's `{% generation %}` markers, by characters.

        The end-of-turn token may stand outside the markers: some templates close them before it.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        for sample in samples:
            _, blocks = render_jinja_template(
                conversations=[messages[: sample.length]],
                tools=tools,
                chat_template=self._source(tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, "enable_thinking": self.thinking},
            )
            for span in sample.spans:
                stop = span.end - len(span.token)
                if not any(start <= span.start and stop <= end for start, end in blocks[0]):
                    raise RowRejected(
                        RejectReason.MARKERS_DISAGREE,
                        f"the answer {sample.text[span.start : span.start + 40]!r} ... (characters {span.start} to "
                        f"{stop}) is not inside one generation block of the template (blocks: {blocks[0]})",
                    )

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        return str(self.tokenizer.get_chat_template(None, tools))

    def _differs_by_thinking(self) -> bool:
        prompts = set()
        for mode in (False, True):
            try:
                prompts.add(
                    self.tokenizer.apply_chat_template(
                        _PROBE[:1], tokenize=False, add_generation_prompt=True, enable_thinking=mode
                    )
                )
            except _RENDER_ERRORS as error:
                raise DataError(f"{self._name()} cannot render a single question: {error}") from error
        return len(prompts) > 1

    def _inserted_before_answers(self) -> tuple[str, ...]:
        """What the template itself writes between its generation prompt and a plain answer, if anything."""
        found = {self._between(_PROBE)}
        with contextlib.suppress(DataError):  # no tool turns in this template: rows with some are rejected one by one
            found.add(self._between(_PROBE_TOOLS))
        return tuple(sorted(block for block in found if block))

    def _between(self, messages: list[Message]) -> str:
        prompt, text = self._probe(messages)
        return text[len(prompt) : text.index(_PROBE_ANSWER, len(prompt))]

    def _probe(self, messages: list[Message]) -> tuple[str, str]:
        try:
            prompt = self.render(messages[:-1], None, prompt=True)
            text = self.render(messages, None, prompt=False)
        except RowRejected as error:
            raise DataError(f"{self._name()} cannot render a plain question and answer: {error}") from error
        if not text.startswith(prompt) or _PROBE_ANSWER not in text[len(prompt) :]:
            raise DataError(
                f"{self._name()} renders a prompt as {prompt[-80:]!r}, and the same prompt with an answer as "
                f"{text[-80:]!r}: the second must begin with the first, or nothing can be supervised"
            )
        return prompt, text

    def _name(self) -> str:
        return f"the chat template of the target (tokenizer {self.tokenizer.name_or_path!r}, digest {self.digest[:12]})"


def template_digest(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's chat template(s)."""
    return hashlib.sha256(canonical_json(tokenizer.chat_template)).hexdigest()


def _merge(turns: list[RenderedSample]) -> list[RenderedSample]:
    """Turns to samples: each in the latest render that agrees with its own, each once. In conversation order."""
    samples: list[RenderedSample] = []
    left = list(turns)
    while left:
        last = left[-1]
        agreeing = [turn for turn in left if last.text.startswith(turn.text[: turn.spans[0].end])]
        samples.append(RenderedSample(last.text, tuple(turn.spans[0] for turn in agreeing), last.length))
        left = [turn for turn in left if turn not in agreeing]
    return samples[::-1]


def _split_reasoning(message: Message) -> Message:
    """A raw completion holds its reasoning in the content, closed by a tag that the prompt opened (or not)."""
    content = message["content"]
    if "reasoning_content" in message or content.count("</think>") != 1:
        return message
    reasoning, _, answer = content.partition("</think>")
    reasoning = reasoning.lstrip().removeprefix("<think>")
    if "<think>" in reasoning:
        return message
    message = {**message, "content": answer.lstrip("\n")}
    return {**message, "reasoning_content": reasoning.strip("\n")} if reasoning.strip() else message


def _roles(messages: list[Message]) -> str:
    return "turns " + ", ".join(message["role"] for message in messages[:8]) + (", ..." if len(messages) > 8 else "")
