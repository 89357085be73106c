from __future__ import annotations

import hashlib
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contract.errors import DataError
from tasks.data.sharding import _local_minima, shard_bounds
from tasks.data.split import split_conversations


def ids(count, tag=""):
    return [hashlib.sha256(f"{tag}{i}".encode()).digest()[:16] for i in range(count)]


def test_fanned_out_conversations_stay_on_one_side():  # TOK-22
    rows = [conversation for conversation in ids(10) for _ in range(5)]
    held_out = split_conversations(rows, 0, 0.2)
    assert len(held_out) == 2
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        assert split_conversations(rows, 0, 0.2) == held_out
    assert any(split_conversations(rows, seed, 0.2) != held_out for seed in range(1, 9))


@given(st.integers(2, 300), st.floats(0.001, 0.999), st.integers(0, 5))
def test_both_sides_have_a_conversation(count, share, seed):
    held_out = split_conversations(ids(count), seed, share)
    assert 1 <= len(held_out) <= count - 1


def test_side_does_not_change_when_data_is_added():
    some, more = ids(500), ids(2000)
    assert split_conversations(more, 0, 0.1) & set(some) == split_conversations(some, 0, 0.1)
    assert 0.08 < len(split_conversations(more, 0, 0.1)) / 2000 < 0.12


def test_one_conversation_cannot_be_split():
    with pytest.raises(DataError, match=r"validation_share.*1 conversation"):
        split_conversations(ids(1) * 3, 0, 0.1)


LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=300)


def sizes(bounds, lengths):
    return [sum(lengths[a:b]) for a, b in bounds]


@settings(max_examples=200)
@given(LENGTHS, st.integers(256, 3000), st.integers(0, 10**6))
def test_shards_cover_all_samples_within_the_limits(lengths, mean, tag):
    bounds = shard_bounds(ids(len(lengths), f"{tag}-"), lengths, mean)
    assert [i for a, b in bounds for i in range(a, b)] == list(range(len(lengths)))
    found = sizes(bounds, lengths)
    if sum(lengths) >= mean / 2:
        # A forced cut of a long piece keeps half the mean on both sides unless a sample is longer than what is left.
        assert min(found) >= mean / 2 or max(lengths) > mean / 4
    assert all(size <= 2 * mean or b - a == 1 for size, (a, b) in zip(found, bounds, strict=True))


def test_mean_shard_size():
    lengths = [random.Random(1).randint(50, 300) for _ in range(20_000)]
    found = sizes(shard_bounds(ids(20_000), lengths, 6144), lengths)
    assert 0.8 * 6144 < sum(found) / len(found) < 1.15 * 6144
    assert min(found) >= 3072
    assert max(found) <= 2 * 6144


def _changed(rng, tag):
    """Names and lengths before and after one row was changed, inserted or removed, and its index."""
    lengths = [rng.randint(20, 200) for _ in range(rng.randint(50, 400))]
    names = ids(len(lengths), f"{tag}-")
    at = rng.randrange(len(lengths))
    kind = rng.choice(["change", "insert", "remove"])
    end = at + (kind != "insert")
    new = [] if kind == "remove" else [hashlib.sha256(f"new{tag}".encode()).digest()[:16]]
    new_lengths = [rng.randint(20, 200)] * len(new)
    return names, lengths, names[:at] + new + names[end:], lengths[:at] + new_lengths + lengths[end:], at


@given(st.integers(0, 10**6))
def test_changed_row_moves_no_content_boundary_beyond_half_the_mean(tag):
    names, lengths, new_names, new_lengths, at = _changed(random.Random(tag), tag)
    before, after = (
        {listed[i] for i in _local_minima(listed, [0, *itertools.accumulate(sizes_)], 1024)}
        for listed, sizes_ in ((names, lengths), (new_names, new_lengths))
    )
    start = list(itertools.accumulate([0, *lengths]))
    changed = [names.index(name) for name in before ^ after if name in names]
    # A row of at most 200 tokens stands between; the ends of the list count as boundaries.
    assert all(abs(start[i] - start[at]) <= 1024 + 200 or start[-1] - start[i] <= 1024 + 200 for i in changed)


def test_changed_row_touches_the_shards_that_hold_or_border_it():
    within = 0
    for tag in range(500):
        names, lengths, new_names, new_lengths, at = _changed(random.Random(tag), tag)
        before = [tuple(names[a:b]) for a, b in shard_bounds(names, lengths, 2048)]
        after = {tuple(new_names[a:b]) for a, b in shard_bounds(new_names, new_lengths, 2048)}
        holder = next(i for i, shard in enumerate(before) if names[at] in shard)
        within += all(abs(i - holder) <= 1 for i, shard in enumerate(before) if shard not in after)
    assert within >= 495  # the rest: pieces longer than twice the mean, cut anew
