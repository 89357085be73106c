from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tasks.contract.receipt import Receipt
from tasks.data.faults import Fault, FaultsFound
from tasks.data.state_digest import row_digests, sample_digests
from tasks.data.states_shard import StatesShard
from tasks.stages.prove import draw
from tasks.target.loading import load_target_folder
from tasks.target.plain import plain_states
from tests.tasks.stages.states_case import StatesCase, make_samples
from tests.tasks.target.families import build

LENGTHS = (9, 30, 14, 30)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_5", tmp_path_factory.mktemp("hybrid"))


class World:
    """An extracted shard whose every sample is proved."""

    def __init__(self, folder: Path, checkpoint: Path, **options: object) -> None:
        self.case = StatesCase(folder, checkpoint, {"layer_ids": [1, 4, 7], "proof_samples": 4, **options})
        self.target = self.case.target()
        self.samples = make_samples(LENGTHS)
        tokens = [self.case.tokens(self.samples)]
        self.extract = self.case.run("extract", {"target": [self.target], "tokens": tokens})

    def object_path(self) -> Path:
        return self.case.path(self.case.states(self.extract).objects[0])

    def prove(self, extract: Receipt) -> Receipt:
        return self.case.run("prove", {"target": [self.target], "extract": [extract]})

    def faults(self, extract: Receipt) -> list[Fault]:
        with pytest.raises(FaultsFound) as raised:
            self.prove(extract)
        return raised.value.faults

    def replaced(self, entries: dict[int, list[np.ndarray]]) -> Receipt:
        """A faulty producer: other states, with digests, checksums and receipts that fit them."""

        def change(tensors: dict[str, np.ndarray]) -> None:
            start = 0
            for index, sample in enumerate(self.samples):
                end = start + len(sample.input_ids)
                for column, states in enumerate(entries[index]):
                    tensors["hidden_states"][start:end, column] = states
                start = end

        extract = self.case.forge(self.extract, change)
        shard = StatesShard([self.object_path()])
        digests = [sample_digests(row_digests(s.hidden_states)[None])[0].numpy() for s in shard]
        return self.case.forge(extract, lambda tensors: tensors["layer_digest"].__setitem__(slice(None), digests))

    def plain(self, ids: list[int]) -> dict[int, list[np.ndarray]]:
        opened = load_target_folder(self.case.target_folder)
        found = {}
        for index, sample in enumerate(self.samples):
            entries = plain_states(opened, sample.input_ids).entries
            found[index] = [entries[i].numpy() for i in ids]
        return found


@pytest.fixture
def world(tmp_path: Path, hybrid: Path) -> World:
    return World(tmp_path, hybrid)


def test_right_states_are_proved(world: World) -> None:
    receipt = world.prove(world.extract)
    assert receipt.counts == {"shards": 1, "samples": 4, "faults": 0}
    assert receipt.metrics["max_error"] < 1e-4
    assert receipt.metrics["min_neighbour_distance"] > 0.1
    assert sorted(receipt.details["max_error"]) == ["1", "4", "7"]
    assert receipt.details["judged"] == [world.case.states(world.extract).digest()]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_by_one_layer_is_found(world: World, shift: int) -> None:
    """EXT-06, EXT-07: states that verify cannot tell from right ones, because everything about them agrees."""
    entries = world.plain([layer + 1 + shift for layer in (1, 4)])
    raw = [s.hidden_states[:, 2].numpy() for s in StatesShard([world.object_path()])]
    extract = world.replaced({i: [*states, raw[i]] for i, states in entries.items()})
    assert world.case.run("verify", {"extract": [extract]}).counts["faults"] == 0
    faults = world.faults(extract)
    assert len(faults) == 8, "both layers in every sample"
    for fault in faults:
        assert fault.kind == "wrong_layer"
        assert fault.detail.endswith(f"nearer to layer {fault.layer + shift}")


def test_the_normed_last_layer_is_not_the_raw_one(world: World) -> None:
    """EXT-09. This target's norm has weights of one: through it, raw and normed states are equal."""
    faults = world.faults(world.replaced(world.plain([2, 5, 8])))
    assert {f.layer for f in faults} == {7}
    assert len(faults) == 4


def test_swapped_samples_are_found_when_they_are_drawn(world: World) -> None:
    raw = [s.hidden_states.numpy() for s in StatesShard([world.object_path()])]
    entries = {i: [raw[i][:, column] for column in range(3)] for i in range(4)}
    entries[1], entries[3] = entries[3], entries[1]
    faults = world.faults(world.replaced(entries))
    assert {f.sample for f in faults} == {world.samples[1].sample_id.hex(), world.samples[3].sample_id.hex()}
    assert {f.layer for f in faults} == {1, 4, 7}


def test_one_wrong_row_is_found(world: World) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        hidden = tensors["hidden_states"]
        hidden[12, 1] = hidden[30, 1]

    [fault] = world.faults(world.case.forge(world.extract, spoil))
    assert (fault.layer, fault.sample) == (4, world.samples[1].sample_id.hex())


def test_not_a_number_fails_the_proof(world: World) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["hidden_states"][0, 0, 0] = np.nan

    [fault] = world.faults(world.case.forge(world.extract, spoil))
    assert (fault.kind, fault.layer) == ("wrong_states", 1)


@pytest.mark.parametrize("last", ["pre_norm", "post_norm"])
def test_the_last_hidden_state_is_proved_too(last: str, tmp_path: Path, hybrid: Path) -> None:
    world = World(tmp_path, hybrid, last_hidden=last, layer_ids=[6], states_dtype="bfloat16")
    assert sorted(world.prove(world.extract).details["max_error"]) == ["6", "last_hidden"]

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["last_hidden"][:] = tensors["hidden_states"][:, 0]

    faults = world.faults(world.case.forge(world.extract, spoil))
    assert {f.layer for f in faults} == {"last_hidden"}
    assert len(faults) == 4


def test_samples_are_drawn_by_the_seed() -> None:
    assert draw(100, 5, "0 abc") == draw(100, 5, "0 abc")
    assert draw(100, 5, "0 abc") != draw(100, 5, "1 abc")
    assert draw(3, 64, "x") == [0, 1, 2]
    assert draw(0, 2, "x") == []
