"""Spreading shards over mapped tasks: by tokens, not by number."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def balanced_groups(items: Sequence[T], n: int, weight: Callable[[T], int]) -> list[list[T]]:
    """Split items into at most `n` groups of nearly equal weight.

    Heaviest first onto the lightest group (the largest group is at most 4/3 of the best possible, Graham 1969). Inside
    a group the items keep their order. The same items in the same order give the same groups.

    Args:
        items: what to spread; none may be left out or repeated.
        n: most groups to make, at least 1. Fewer items make fewer groups: no group is empty.
        weight: of one item, e.g. its tokens; not negative.
    """
    if n < 1:
        raise ValueError(f"n: found {n}; expected at least one group")
    groups: list[list[int]] = [[] for _ in range(min(n, len(items)))]
    lightest = [(0, index) for index in range(len(groups))]
    # Weightless items count as one: they must not all pile up in the same group.
    weights = [max(1, weight(item)) for item in items]
    for position in sorted(range(len(items)), key=lambda p: (-weights[p], p)):
        total, index = heapq.heappop(lightest)
        groups[index].append(position)
        heapq.heappush(lightest, (total + weights[position], index))
    return [[items[position] for position in sorted(group)] for group in sorted(groups, key=min)]
