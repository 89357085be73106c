"""Shard boundaries that follow the content, so that a changed row touches only the shards around it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def shard_bounds(sample_ids: Sequence[bytes], lengths: Sequence[int], mean_tokens: int) -> list[tuple[int, int]]:
    """Cut a list of samples into shards.

    A shard begins at each sample whose id is the smallest of all samples that begin within half of `mean_tokens`
    before or after it. Whether it is depends on these neighbours alone, so a row that is changed, added or removed
    moves no boundary farther away than that; two boundaries are never closer, and the mean distance is about
    `mean_tokens`. The rare piece longer than twice the mean is cut further, at its smallest ids.

    Args:
        sample_ids: distinct digests, in order.
        lengths: tokens of each sample.
        mean_tokens: of a shard; the least is half of it, the most twice (a longer single sample is a shard).

    Returns:
        (first, last + 1) of each shard, covering all samples in order.
    """
    if not sample_ids:
        return []
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    reach = mean_tokens / 2
    cuts = [0, *_local_minima(sample_ids, starts, reach), len(sample_ids)]
    bounds: list[tuple[int, int]] = []
    for first, end in itertools.pairwise(cuts):
        bounds += _cut_long(first, end, sample_ids, starts, reach, 2 * mean_tokens)
    return bounds


def _local_minima(ids: Sequence[bytes], starts: Sequence[int], reach: float) -> list[int]:
    """Samples with the smallest id within `reach` tokens on both sides, and at least so far from both ends."""
    nearer = [True] * len(ids)  # is every smaller id on that side at least `reach` away?
    for order in (range(len(ids)), range(len(ids) - 1, -1, -1)):
        smaller: list[int] = []  # ids rising from bottom to top
        for i in order:
            while smaller and ids[smaller[-1]] > ids[i]:
                smaller.pop()
            if smaller and abs(starts[smaller[-1]] - starts[i]) < reach:
                nearer[i] = False
            smaller.append(i)
    return [i for i, is_minimum in enumerate(nearer) if is_minimum and reach <= starts[i] <= starts[-1] - reach]


def _cut_long(
    first: int, end: int, ids: Sequence[bytes], starts: Sequence[int], reach: float, most: int
) -> list[tuple[int, int]]:
    bounds: list[tuple[int, int]] = []
    pieces = [(first, end)]
    while pieces:
        first, end = pieces.pop()
        if starts[end] - starts[first] <= most or end - first == 1:
            bounds.append((first, end))
            continue
        inner = range(first + 1, end)
        allowed = [i for i in inner if starts[i] - starts[first] >= reach and starts[end] - starts[i] >= reach]
        middle = (starts[first] + starts[end]) / 2
        cut = min(allowed, key=lambda i: ids[i]) if allowed else min(inner, key=lambda i: abs(starts[i] - middle))
        pieces += [(cut, end), (first, cut)]
    return bounds
