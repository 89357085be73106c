"""Anchors: where the blocks of a sample start, drawn anew in each epoch."""

from __future__ import annotations

import hashlib

import numpy as np


def legal_anchors(loss_mask: np.ndarray) -> np.ndarray:
    """Positions a with the token at a and the one at a + 1 supervised: the block starts inside an answer and has at
    least one slot to learn.

    Args:
        loss_mask: [T].

    Returns:
        Ascending int64 positions.
    """
    supervised = np.asarray(loss_mask) != 0
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def draw_anchors(loss_mask: np.ndarray, count: int, *, seed: int, epoch: int, sample_id: bytes) -> np.ndarray:
    """At most `count` distinct legal anchors, ascending.

    The draw depends on seed, epoch and sample alone: neither the order of samples nor the number of processes matters.
    """
    legal = legal_anchors(loss_mask)
    if len(legal) <= count:
        return legal
    digest = hashlib.blake2b(f"{seed} {epoch} ".encode() + sample_id, digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "big"))
    return np.sort(generator.choice(legal, size=count, replace=False))
