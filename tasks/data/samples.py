"""Rows of a chat file to samples: format, template, tokens and mask, with everything left out accounted for."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tasks.data.chat_format import ChatFormat, Conversation, detect_format, parse_row, repair_unicode
from tasks.data.loss_mask import tokenize_samples
from tasks.data.reading import Row
from tasks.data.rejection import Rejection, RowRejected
from tasks.data.rendering import ChatTemplate, RenderedSample
from tasks.data.token_shard import ID_BYTES, Sample, sample_digest

BATCH_ROWS = 256
BATCH_CHARACTERS = 4_000_000  # of a batch given to the tokenizer; bounds memory where rows are long


@dataclass
class RowResult:
    """What became of one row. It is kept if it gave a sample, rejected otherwise."""

    line: int
    chat_format: ChatFormat | None = None
    samples: list[Sample] = field(default_factory=list)
    left_out: list[Rejection] = field(default_factory=list)  # turns and samples of the row, and the row itself
    repaired: bool = False  # lone surrogates were replaced

    @property
    def rejection(self) -> Rejection | None:
        """Why the row gave no sample."""
        return None if self.samples else self.left_out[0]


@dataclass
class _Pending:
    result: RowResult
    rendered: list[tuple[RenderedSample, Conversation]] = field(default_factory=list)

    @property
    def characters(self) -> int:
        return sum(len(sample.text) for sample, _ in self.rendered)


def make_samples(
    rows: Iterable[Row], template: ChatTemplate, *, supervise: str, max_length: int, slice_id: int = 0
) -> Iterator[RowResult]:
    """One result for each row, in order. Rows are tokenized in batches; the results do not depend on the batches.

    Args:
        rows: as `read_rows` yields them.
        template: of the target.
        supervise: `every_turn` or `last_turn`.
        max_length: tokens kept of a sample.
        slice_id: of the file.
    """
    batch: list[_Pending] = []
    characters = 0
    for line, row in rows:
        pending = _render(line, row, template, supervise)
        batch.append(pending)
        characters += pending.characters
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield from _tokenize(batch, template, max_length, slice_id)
            batch, characters = [], 0
    yield from _tokenize(batch, template, max_length, slice_id)


def conversation_digest(conversation: Conversation) -> bytes:
    """First 16 bytes of a SHA-256 over the system message and the first question, blanks and case aside.

    Turns of one conversation, and near copies of it, share it, so that a split by it keeps them together.
    """
    first = {role: "" for role in ("system", "user")}
    for message in reversed(conversation.messages):
        if message["role"] in first:
            first[message["role"]] = " ".join(message["content"].split()).casefold()
    return hashlib.sha256("\0".join(first.values()).encode()).digest()[:ID_BYTES]


def _render(line: int, row: dict[str, object] | Rejection, template: ChatTemplate, supervise: str) -> _Pending:
    pending = _Pending(RowResult(line))
    result = pending.result
    if isinstance(row, Rejection):
        result.left_out.append(row)
        return pending
    whole, result.repaired = repair_unicode(row)
    try:
        result.chat_format = detect_format(whole)
        conversations = parse_row(whole, result.chat_format)
    except RowRejected as error:
        result.left_out.append(error.rejection)
        return pending
    for conversation in conversations:
        try:
            samples, lost = template.samples(conversation, supervise)
        except RowRejected as error:
            result.left_out.append(error.rejection)
            continue
        pending.rendered += [(sample, conversation) for sample in samples]
        result.left_out += [error.rejection for error in lost]
    return pending


def _tokenize(batch: list[_Pending], template: ChatTemplate, max_length: int, slice_id: int) -> Iterator[RowResult]:
    rendered = [sample for pending in batch for sample, _ in pending.rendered]
    tokenized = iter(tokenize_samples(template.tokenizer, rendered, max_length) if rendered else ())
    for pending in batch:
        count = len(pending.rendered)
        for (_, conversation), outcome in zip(pending.rendered, itertools.islice(tokenized, count), strict=True):
            if isinstance(outcome, Rejection):
                pending.result.left_out.append(outcome)
                continue
            ids, mask = outcome
            pending.result.samples.append(
                Sample(ids, mask, sample_digest(ids, mask), conversation_digest(conversation), slice_id,
                       conversation.origin)
            )  # fmt: skip
        yield pending.result
