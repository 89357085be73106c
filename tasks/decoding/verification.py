"""Probe of a target: may a block of draft tokens be verified in one cached forward, and taken back?

Some families' cached forward over several tokens is not what token-by-token decoding computes (a recurrent kernel that
starts from zero, a convolution that forgets its left context). On such a target the block forward would verify against
another model. The probe finds this out on the target itself; it is then verified token by token, which is exact and not
faster than plain decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tasks.decoding.cache_rollback import CacheRollback
from tasks.decoding.cached_target import CachedTarget, plain_logits

if TYPE_CHECKING:
    from tasks.target.loading import Target

log = logging.getLogger("tasks")
Verification = Literal["block", "token"]

# Relative L2 distance of logits. Kernels that differ only in rounding stay below 1e-5 in fp32. In reduced precision the
# yardstick is the target's own rounding: token-by-token decoding against one forward without a cache.
TOLERANCE = 1e-3
ROUNDING_FACTOR = 2.0
_LONGEST_PROBE = 512  # tokens; past the windows of small targets, and cheap on large ones


@dataclass(frozen=True)
class Probe:
    """What the probe found.

    Attributes:
        verification: `block` or `token`.
        block_distance: relative L2 distance between the logits of one block forward and of token-by-token decoding.
        rounding: the same between token-by-token decoding and one forward without a cache.
        rollback_distance: the same for a token decoded after wrong tokens were fed and taken back.
        needs_replay: whether a rejection costs a further forward over the accepted tokens.
    """

    verification: Verification
    block_distance: float
    rollback_distance: float
    rounding: float
    needs_replay: bool


@torch.inference_mode()
def probe_verification(target: Target, prompt_ids: Sequence[int], block_size: int) -> Probe:
    """Compare block forwards with token-by-token decoding on a prompt, and a rollback with a run without one.

    Args:
        target: the target.
        prompt_ids: at least one token; a short prompt is repeated.
        block_size: tokens of a block.
    """
    block = max(block_size, 2)
    needed = 2 * block
    ids = list(prompt_ids[:_LONGEST_PROBE])
    ids *= -(-needed // len(ids))
    head, tail = ids[:-block], ids[-block:]

    plain = CachedTarget(target)
    plain.prefill(head)
    expected = torch.cat([plain.forward([token]) for token in tail])
    rounding = _distance(plain_logits(target, ids, block).float(), expected)

    cached = CachedTarget(target)
    cached.prefill(head)
    assert cached.cache is not None
    rollback = CacheRollback(cached.cache)
    rollback.mark()
    block_distance = _distance(cached.forward(tail), expected)
    replay = rollback.keep(block, 1)  # only tail[0] stays: the others are what a rejection takes back
    if replay:
        cached.forward(tail[:replay])
    rollback.mark()
    wrong = [(token + 1) % target.vocab_size for token in tail[1:]]
    cached.forward(wrong)
    rollback.keep(len(wrong), 0)
    rollback_distance = _distance(cached.forward(tail[1:2]), expected[1:2])

    tolerance = max(TOLERANCE, ROUNDING_FACTOR * rounding) if target.dtype.itemsize < 4 else TOLERANCE
    exact = block_distance <= tolerance and rollback_distance <= tolerance
    probe = Probe("block" if exact else "token", block_distance, rollback_distance, rounding, rollback.needs_replay)
    if not exact:
        log.warning(
            "target %s: a cached forward over %d tokens is off by %.2g, after a rollback by %.2g (relative L2 of the "
            "logits; %.2g allowed): drafts are verified token by token, exactly but without a speedup",
            getattr(target.config, "model_type", "?"),
            block,
            block_distance,
            rollback_distance,
            tolerance,
        )
    return probe


def _distance(found: Tensor, expected: Tensor) -> float:
    centred = expected - expected.mean(dim=-1, keepdim=True)  # a constant added to all logits changes nothing
    difference = found - found.mean(dim=-1, keepdim=True) - centred
    return float(difference.norm() / centred.norm().clamp_min(1e-12))
