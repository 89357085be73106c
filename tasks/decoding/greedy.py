"""Plain greedy decoding of one prompt: the reference that speculative decoding must reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tasks.decoding.cached_target import CachedTarget, choose

if TYPE_CHECKING:
    from tasks.target.loading import Target


@dataclass(frozen=True)
class GreedyText:
    """Answer of one prompt.

    Attributes:
        tokens: generated ids, the end token included where one came.
        margins: largest minus second largest logit at each generated token; 0 where two are equal.
        ended: whether the last token is an end token (otherwise the limit was reached).
        prefill_seconds: until the first token is known.
        decode_seconds: for all the others.
    """

    tokens: list[int]
    margins: list[float]
    ended: bool
    prefill_seconds: float
    decode_seconds: float


@torch.inference_mode()
def greedy_decode(target: Target, prompt_ids: Sequence[int], *, max_new_tokens: int) -> GreedyText:
    """Decode with a cache, one token a forward, until an end token (which is kept) or the limit.

    Among equal logits the lowest id wins.
    """
    decoder = CachedTarget(target)
    start = decoder.seconds()
    logits = decoder.prefill(prompt_ids)
    tokens, margins = choose(logits[None]), [_margin(logits)]
    prefilled = decoder.seconds()
    while tokens[-1] not in target.eos_ids and len(tokens) < max_new_tokens:
        logits = decoder.forward(tokens[-1:])[-1]
        tokens += choose(logits[None])
        margins.append(_margin(logits))
    return GreedyText(tokens, margins, tokens[-1] in target.eos_ids, prefilled - start, decoder.seconds() - prefilled)


def _margin(logits: torch.Tensor) -> float:
    first, second = logits.topk(2).values.tolist()
    return float(first - second)
