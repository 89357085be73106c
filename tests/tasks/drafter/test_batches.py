from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tasks.contract.errors import IntegrityError
from tasks.data.states_shard import StatesHeader
from tasks.data.states_writer import StatesShardWriter
from tasks.drafter.batches import (
    Row,
    ShardIndex,
    StatesSource,
    epoch_order,
    epoch_steps,
    index_shard,
    make_rows,
    prefetch,
    validation_rows,
)
from tests.tasks.drafter.cases import BLOCK, HIDDEN, LAYERS, Shards, sample, shards


def test_every_usable_sample_comes_once_an_epoch_in_another_order() -> None:
    data = Shards([[sample(9, n) for n in range(7)], [sample(9, 20), sample(5, 21, mask=[0, 0, 0, 0, 1])]])
    assert data.index[1].usable == (0,)
    orders = [epoch_order(data.index, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == [(0, n) for n in range(7)] + [(1, 0)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_is_a_function_of_the_samples_and_not_of_the_list() -> None:
    data = shards()
    names = [data.index[s].sample_ids[i] for s, i in epoch_order(data.index, 3, 1)]
    turned = list(reversed(data.index))
    assert [turned[s].sample_ids[i] for s, i in epoch_order(turned, 3, 1)] == names


def test_a_window_of_shards_is_mixed_and_no_more() -> None:
    index = [ShardIndex(f"s{n}", tuple(bytes([n, i]) for i in range(5)), (3,) * 5, (0, 1, 2, 3, 4)) for n in range(6)]
    order = [shard for shard, _ in epoch_order(index, 0, 0, window=2)]
    parts = [set(order[i : i + 10]) for i in range(0, 30, 10)]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert set.union(*parts) == set(range(6))


def test_steps_hold_whole_samples_up_to_the_limit() -> None:
    data = shards(20)
    lengths = {(s, i): length for s, shard in enumerate(data.index) for i, length in enumerate(shard.lengths)}
    steps = epoch_steps(data.index, 0, 0, 40)
    assert [a for step in steps for a in step] == epoch_order(data.index, 0, 0)
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        total = sum(lengths[a] for a in step)
        assert total <= 40
        assert following is None or total + lengths[following[0]] > 40
    assert [len(step) for step in epoch_steps(data.index, 0, 0, 1)] == [1] * 20


def test_a_row_packs_samples_with_positions_and_documents_of_their_own() -> None:
    items = [sample(6, 1), sample(5, 2, mask=[0, 0, 0, 0, 1]), sample(8, 3)]
    [row] = make_rows(items, anchors=100, block_size=BLOCK, seed=0, epoch=0)
    assert row.sample_ids == (items[0].sample.sample_id.hex(), items[2].sample.sample_id.hex())
    assert row.positions.tolist() == [[*range(6), *range(8)]]
    assert row.documents.tolist() == [[0] * 6 + [1] * 8]
    assert row.anchors.tolist() == [[2, 3, 4, 8, 9, 10, 11, 12]]
    assert row.ends.tolist() == [6] * 3 + [14] * 5
    assert row.states.shape == (1, 14, LAYERS, HIDDEN)
    assert torch.equal(row.states[0, 6:], items[2].hidden_states)
    assert row.input_ids.tolist() == [*items[0].sample.input_ids, *items[2].sample.input_ids]


def test_rows_stay_within_tokens_and_slots() -> None:
    items = [sample(20, n) for n in range(6)]

    def rows(**limits: int) -> list[Row]:
        return list(make_rows(items, anchors=5, block_size=4, seed=0, epoch=0, **limits))

    assert [len(row.sample_ids) for row in rows()] == [6]
    assert [len(row.sample_ids) for row in rows(row_tokens=45)] == [2, 2, 2]
    assert [len(row.sample_ids) for row in rows(row_slots=60)] == [3, 3]
    assert [len(row.sample_ids) for row in rows(row_slots=1)] == [1] * 6
    assert list(make_rows([sample(4, 1, mask=[0, 0, 0, 1])], anchors=5, block_size=4, seed=0, epoch=0)) == []


def test_anchors_change_with_the_epoch_and_not_with_the_company() -> None:
    items = [sample(60, n) for n in range(3)]

    def anchors(chosen: list[int], epoch: int) -> list[list[int]]:
        [row] = make_rows([items[n] for n in chosen], anchors=5, block_size=4, seed=0, epoch=epoch)
        starts = [60 * n for n in range(len(chosen))]
        found = row.anchors[0].tolist()
        return [[a - s for a in found if s <= a < s + 60] for s in starts]

    first = anchors([0, 1, 2], 0)
    assert anchors([2, 0], 0) == [first[2], first[0]]
    assert all(a != b for a, b in zip(first, anchors([0, 1, 2], 1), strict=True))


def test_validation_rows_are_the_same_every_time() -> None:
    data = shards()
    rows = [list(validation_rows(data.index, data, samples=5, anchors=3, block_size=4, seed=0)) for _ in range(2)]
    assert [r.sample_ids for r in rows[0]] == [r.sample_ids for r in rows[1]]
    assert torch.equal(rows[0][0].anchors, rows[1][0].anchors)
    assert rows[0][0].anchors.shape == (1, 15)
    assert list(validation_rows([], data, samples=5, anchors=3, block_size=4, seed=0)) == []


# ---- shards on the disk ---------------------------------------------------------------------------------------------


def write_shards(folder: Path, data: Shards) -> list[Path]:
    paths = []
    for number, samples in enumerate(data.samples):
        place = folder / f"{number}"
        place.mkdir(parents=True)
        writer = StatesShardWriter(
            place,
            [s.sample for s in samples],
            StatesHeader((1, 3, 5), "none", "t", f"k{number}", ("a",)),
            HIDDEN,
            "float32",
        )
        for index, item in enumerate(samples):
            writer.put(index, item.hidden_states, None, item.layer_digest)
        paths += writer.close()
    return paths


def test_shards_are_fetched_once_and_a_few_are_kept(tmp_path: Path) -> None:
    data = Shards([[sample(6, 10 * n + i) for i in range(2)] for n in range(4)])
    paths = write_shards(tmp_path, data)
    fetched = []

    def fetch(number: int) -> list[Path]:
        fetched.append(number)
        return [paths[number]]

    source = StatesSource(data.index, fetch, keep=2)
    for address in ((0, 0), (1, 1), (0, 1), (2, 0), (0, 0)):
        assert torch.equal(source(address).hidden_states, data(address).hidden_states)
    assert fetched == [0, 1, 2]
    assert [path.exists() for path in paths] == [True, False, True, True]  # the least recently used one went


def test_states_of_other_samples_are_refused(tmp_path: Path) -> None:
    data = Shards([[sample(6, 1), sample(6, 2)]])
    [path] = write_shards(tmp_path, data)
    other = index_shard("tokens-key", [data.samples[0][1].sample, data.samples[0][0].sample])
    with pytest.raises(IntegrityError, match="states of token shard tokens-key, sample 0: found sample id"):
        StatesSource([other], lambda number: [path])((0, 0))


# ---- prefetching ----------------------------------------------------------------------------------------------------


def test_prefetch_gives_the_same_steps_and_stays_a_few_ahead() -> None:
    made = []

    def steps() -> Iterator[list[Row]]:
        for number in range(10):
            made.append(number)
            yield [number]  # type: ignore[list-item]

    found = prefetch(steps(), depth=2)
    assert next(found) == [0]
    time.sleep(0.1)
    assert len(made) <= 5
    assert list(found) == [[n] for n in range(1, 10)]


def test_an_error_of_the_thread_reaches_the_training() -> None:
    def steps() -> Iterator[list[Row]]:
        yield []
        raise IntegrityError("shard 3")

    found = prefetch(steps())
    assert next(found) == []
    with pytest.raises(IntegrityError, match="shard 3"):
        next(found)


def test_a_prefetch_that_is_given_up_ends_its_thread() -> None:
    import threading

    def steps() -> Iterator[list[Row]]:
        while True:
            yield []

    found = prefetch(steps())
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]
