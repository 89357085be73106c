"""Rendered texts to token ids and a loss mask that is 1 exactly where the target itself speaks.

The ids are those of the template applied in one call: the whole text is tokenized at once. A token that begins before
the target's words (template text, or a user's) and reaches into them is not supervised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tasks.data.rejection import Rejection, RejectReason
from tasks.data.rendering import RenderedSample, Span

MaskedTokens = tuple[np.ndarray, np.ndarray]


def tokenize_samples(
    tokenizer: Any, samples: Sequence[RenderedSample], max_length: int
) -> list[MaskedTokens | Rejection]:
    """Token ids (int32 [T]) and loss mask (uint8 [T]) of each text, cut to what a drafter can use.

    At most `max_length` tokens are kept and nothing after the last supervised one. A sample needs an anchor with a
    supervised token after it, hence two supervised tokens.
    """
    encodings = tokenizer(
        [sample.text for sample in samples],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    results: list[MaskedTokens | Rejection] = []
    for sample, ids, offsets in zip(samples, encodings["input_ids"], encodings["offset_mapping"], strict=True):
        mask = loss_mask(tokenizer, sample, ids, np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
        results.append(_usable(np.asarray(ids, dtype=np.int32), mask, max_length))
    return results


def loss_mask(tokenizer: Any, sample: RenderedSample, ids: Sequence[int], offsets: np.ndarray) -> np.ndarray:
    """Loss mask, uint8 [T], of a text's tokens.

    Args:
        tokenizer: resolves the boundaries that offsets leave open (they leave blanks out with some tokenizers).
        sample: text and spans.
        ids: token ids of the whole text.
        offsets: int64 [T, 2], characters of each token.
    """
    mask = np.zeros(len(ids), dtype=np.uint8)
    for span in sample.spans:
        first = _first_token(tokenizer, sample.text, span.start, ids, offsets)
        mask[first : _last_token(span, offsets)] = 1
    return mask


def _first_token(tokenizer: Any, text: str, start: int, ids: Sequence[int], offsets: np.ndarray) -> int:
    """Index of the first token that begins at or after character `start`."""
    index = int(np.searchsorted(offsets[:, 0], start))
    before = int(offsets[index - 1, 1]) if index else 0
    if before == start and index < len(ids) and offsets[index, 0] == start:
        return index
    # A blank stands at the boundary: offsets may leave it out. Compare with the tokens of the text before it.
    prefix = tokenizer(text[:start], add_special_tokens=False, verbose=False)["input_ids"]
    same = next((i for i, (a, b) in enumerate(zip(prefix, ids, strict=False)) if a != b), min(len(prefix), len(ids)))
    if same == len(prefix):
        return same
    wanted = len(_decode(tokenizer, prefix[same:]))
    index = same
    while index < len(ids) and len(_decode(tokenizer, ids[same:index])) < wanted:
        index += 1
    return index


def _last_token(span: Span, offsets: np.ndarray) -> int:
    """Index after the last token that begins before the span's end (and ends by it, if no end token stands there)."""
    index = int(np.searchsorted(offsets[:, 0], span.end))
    while not span.token and index and offsets[index - 1, 1] > span.end:
        index -= 1
    return index


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _usable(ids: np.ndarray, mask: np.ndarray, max_length: int) -> MaskedTokens | Rejection:
    total, supervised = len(ids), int(mask.sum())
    ids, mask = ids[:max_length], mask[:max_length]
    positions = np.flatnonzero(mask)
    if not len(positions):
        detail = f"{supervised} of {total} tokens are supervised, none of them among the first {max_length}"
        return Rejection(RejectReason.NO_SUPERVISED_TOKENS, detail)
    if len(positions) < 2:
        return Rejection(RejectReason.TOO_SHORT, f"1 supervised token in the first {max_length} of {total}")
    end = int(positions[-1]) + 1
    return ids[:end].copy(), mask[:end].copy()
