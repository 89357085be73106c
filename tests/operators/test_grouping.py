from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.grouping import balanced_groups
from operators.pipeline import group_shards

WEIGHTS = st.lists(st.integers(0, 1000), max_size=60)


@given(WEIGHTS, st.integers(1, 20))
def test_every_item_is_in_one_group_and_no_group_is_empty(weights, n):
    items = list(range(len(weights)))
    groups = balanced_groups(items, n, lambda item: weights[item])
    assert sorted(item for group in groups for item in group) == items
    assert len(groups) == min(n, len(items))
    assert all(group == sorted(group) and group for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@given(WEIGHTS.filter(bool), st.integers(1, 20))
def test_largest_group_is_within_a_third_of_the_best(weights, n):
    groups = balanced_groups(weights, n, lambda weight: weight)
    weighed = [max(1, weight) for weight in weights]
    best = max(-(-sum(weighed) // n), max(weighed))  # no grouping can do better than this
    ranked = sorted(weighed, reverse=True)
    if len(ranked) > n:
        best = max(best, ranked[n - 1] + ranked[n])  # two of the n + 1 heaviest share a group
    assert 3 * max(sum(max(1, weight) for weight in group) for group in groups) <= 4 * best


def test_two_thousand_five_hundred_shards_stay_few_tasks():
    """ORC-10: mapping is over groups, not shards."""
    shards = [
        {"ref": {"kind": "tokens", "key": f"{n:x}", "identity": f"{n:x}", "digest": "0"}, "tokens": 300 + n % 200}
        for n in range(2500)
    ]
    groups = group_shards(shards, 16)
    assert len(groups) == 16
    tokens = [sum(300 + int(ref["key"], 16) % 200 for ref in group) for group in groups]
    assert max(tokens) - min(tokens) < 500
    assert groups == group_shards(shards, 16)


def test_zero_groups_are_refused():
    with pytest.raises(ValueError, match="n: found 0"):
        balanced_groups([1], 0, lambda item: item)
