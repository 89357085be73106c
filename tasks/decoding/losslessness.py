"""Is the text of speculative decoding the target's own? Exact in fp32, within a logit margin in reduced precision.

In bfloat16 a forward over one token and one over a block round differently, so a near tie between the two best tokens
can fall either way without any fault; from there on the texts differ. There the check is teacher forcing: one plain
forward over prompt and text, in which each emitted token must be the target's first choice or within the margin of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tasks.contract.errors import DecodingMismatch
from tasks.decoding.cached_target import choose, plain_logits

if TYPE_CHECKING:
    from tasks.target.loading import Target

# Logits of a bf16 forward carry 8 bits: two forwards of one model differ by up to about 1/32 of the largest logit after
# a few dozen layers. What is off by more is not rounding.
RELATIVE_MARGIN = 1 / 32
_ROWS = 256  # rows of logits in fp32 at a time


@dataclass(frozen=True)
class TextCheck:
    """What the check of one text found.

    Attributes:
        equal: whether the text is the reference's, token for token.
        near_ties: tokens that are not the first choice of the plain forward but within the margin of it.
        largest_gap: the largest such distance, in logits.
        margin: the margin allowed (the largest over the text), in logits; 0 for the exact check.
    """

    equal: bool
    near_ties: int = 0
    largest_gap: float = 0.0
    margin: float = 0.0


def check_exact(prompt_id: str, prompt_length: int, found: Sequence[int], expected: Sequence[int]) -> TextCheck:
    """Token for token.

    Raises:
        DecodingMismatch: naming the prompt, the first position that differs, and both tokens.
    """
    for index in range(max(len(found), len(expected))):
        left = found[index] if index < len(found) else None
        right = expected[index] if index < len(expected) else None
        if left != right:
            raise DecodingMismatch(
                f"prompt {prompt_id}: answer token {index} (position {prompt_length + index}) is {_name(left)} in "
                f"speculative decoding and {_name(right)} in plain greedy decoding; expected equal texts in float32: "
                "verification or rollback is not exact on this target"
            )
    return TextCheck(equal=True)


@torch.inference_mode()
def check_within_margin(
    target: Target,
    prompt_id: str,
    prompt_ids: Sequence[int],
    found: Sequence[int],
    expected: Sequence[int],
    relative_margin: float = RELATIVE_MARGIN,
) -> TextCheck:
    """Teacher forcing: every emitted token is the first choice of a plain forward, or nearly.

    Args:
        target: the target.
        prompt_id: name of the prompt, for the message.
        prompt_ids: the prompt.
        found: text of speculative decoding.
        expected: text of plain greedy decoding.
        relative_margin: allowed distance to the largest logit, as a share of the largest absolute logit there.

    Raises:
        DecodingMismatch: naming the prompt, the position, both tokens and the distance.
    """
    logits = plain_logits(target, [*prompt_ids, *found], len(found) + 1)[:-1]
    best: list[int] = []
    gaps: list[float] = []
    margins: list[float] = []
    tokens = torch.tensor(list(found), device=logits.device)
    for rows, emitted in zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True):
        values = rows.float()
        best += choose(values)
        gaps += (values.amax(dim=-1) - values.gather(1, emitted[:, None])[:, 0]).tolist()
        margins += (relative_margin * values.abs().amax(dim=-1)).tolist()
    near = 0
    for index, (token, gap, margin) in enumerate(zip(found, gaps, margins, strict=True)):
        if gap > margin:
            raise DecodingMismatch(
                f"prompt {prompt_id}: answer token {index} (position {len(prompt_ids) + index}) is {token} in "
                f"speculative decoding and {best[index]} in a plain forward over the same text, {gap:.4g} logits "
                f"apart; expected at most {margin:.4g} (near ties in reduced precision): verification or rollback is "
                "not exact on this target"
            )
        near += token != best[index]
    return TextCheck(list(found) == list(expected), near, max(gaps), max(margins))


def _name(token: int | None) -> str:
    return "nothing (the text has ended)" if token is None else f"token {token}"
