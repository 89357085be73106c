"""A page of prompts and answers, the text coloured by who wrote it: draft tokens that were accepted, or the target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tasks.decoding.acceptance import Step

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; width: 100%; }
th, td { border: 1px solid #d5d5d5; padding: .5rem; text-align: left; vertical-align: top; }
th { background: #f3f3f3; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 30rem; }
.prompt { color: #555; }
.draft { background: #cdebd0; }
.draft.odd { background: #a9dcb0; }
.target { background: #f7d9c4; }
"""
_PROMPT_CHARACTERS = 600  # of the end of a prompt, where the question is
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Row:
    """One decoded prompt."""

    prompt_id: str
    slice: str
    prompt_ids: list[int]
    tokens: list[int]
    steps: list[Step]


def prompt_page(rows: Iterable[Row], tokenizer: Any, title: str) -> str:
    """HTML page, complete in itself (no script, nothing loaded); all text is escaped.

    Args:
        rows: decoded prompts.
        tokenizer: has `decode(ids, skip_special_tokens=...)`.
        title: heading of the page.
    """
    body = "\n".join(_row(row, tokenizer) for row in rows)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        "<p><span class='draft'>accepted draft tokens</span> (shades alternate by verification step), "
        "<span class='target'>the target's own token</span> of a step or of the prefill.</p>"
        "<table><thead><tr><th>Prompt</th><th>Slice</th><th>Tokens</th><th>Steps</th><th>Tokens per step</th>"
        f"<th>Text</th></tr></thead><tbody>\n{body}\n</tbody></table></body></html>\n"
    )


def _row(row: Row, tokenizer: Any) -> str:
    emitted = sum(step.emitted for step in row.steps)
    mean = f"{emitted / len(row.steps):.2f}" if row.steps else "no step"
    pieces = token_texts(tokenizer, row.tokens)
    spans, start = [_span("target", pieces[:1])], 1
    for number, step in enumerate(row.steps):
        spans.append(_span("draft odd" if number % 2 else "draft", pieces[start : start + step.accepted]))
        spans.append(_span("target", pieces[start + step.accepted : start + step.emitted]))
        start += step.emitted
    prompt = str(tokenizer.decode(row.prompt_ids, skip_special_tokens=False))
    if len(prompt) > _PROMPT_CHARACTERS:
        prompt = "…" + prompt[-_PROMPT_CHARACTERS:]
    return (
        f"<tr><td>{escape(row.prompt_id[:12])}</td><td>{escape(row.slice)}</td><td>{len(row.tokens)}</td>"
        f"<td>{len(row.steps)}</td><td>{mean}</td>"
        f"<td class='text'><span class='prompt'>{escape(prompt)}</span>{''.join(spans)}</td></tr>"
    )


def _span(name: str, pieces: Sequence[str]) -> str:
    text = "".join(pieces)
    return f"<span class='{name}'>{escape(text)}</span>" if text else ""


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text. A character of several tokens stands with the last of them."""
    texts: list[str] = []
    start = done = 0  # decoding restarts at `start`, so that the work does not grow with the text
    for end in range(1, len(tokens) + 1):
        before = tokenizer.decode(tokens[start:done], skip_special_tokens=False)
        after = tokenizer.decode(tokens[start:end], skip_special_tokens=False)
        if after.endswith(_UNFINISHED) and end < len(tokens):
            texts.append("")
            continue
        texts.append(after[len(before) :])
        start, done = done, end
    return texts
