"""Every kind of damage to stored states is found and named; healthy shards raise nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tasks.contract.receipt import Receipt
from tasks.data.faults import Fault, FaultsFound, read_faults
from tasks.data.repair import repair_run
from tests.tasks.stages.states_case import StatesCase, change_tensors, make_sample, make_samples
from tests.tasks.target.families import build

LENGTHS = (9, 30, 4, 30, 12, 16, 21, 8, 1)
Change = Callable[[dict[str, np.ndarray]], None]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3", tmp_path_factory.mktemp("dense"))


class World:
    """An extracted group of two shards."""

    def __init__(self, folder: Path, checkpoint: Path, **options: object) -> None:
        self.case = StatesCase(folder, checkpoint, {"layer_ids": [0, 1, 3], **options})
        self.target = self.case.target()
        self.samples = [make_samples(LENGTHS, seed) for seed in range(2)]
        self.tokens = [self.case.tokens(s) for s in self.samples]
        self.extract = self.case.run("extract", {"target": [self.target], "tokens": self.tokens})
        self.keys = [e["states"]["key"] for e in self.extract.details["shards"]]

    def object_path(self, index: int = 0) -> Path:
        return self.case.path(self.case.states(self.extract, index).objects[0])

    def name(self, index: int, shard: int = 0) -> str:
        return self.samples[shard][index].sample_id.hex()

    def faults(self, extract: Receipt | None = None) -> list[Fault]:
        with pytest.raises(FaultsFound) as raised:
            self.case.run("verify", {"extract": [extract or self.extract]})
        assert raised.value.faults == read_faults(self.case.store, "test")
        for fault in raised.value.faults[:40]:
            assert str(fault) in str(raised.value)
        return raised.value.faults

    def forged(self, change: Change) -> list[Fault]:
        return self.faults(self.case.forge(self.extract, change))


@pytest.fixture
def world(tmp_path: Path, dense: Path) -> World:
    return World(tmp_path, dense)


def rows(index: int) -> slice:
    start = sum(LENGTHS[:index])
    return slice(start, start + LENGTHS[index])


def test_healthy_shards_pass(world: World) -> None:
    receipt = world.case.run("verify", {"extract": [world.extract]})
    assert receipt.counts["samples"] == 2 * len(LENGTHS)
    assert receipt.counts["bytes"] == sum(world.object_path(i).stat().st_size for i in (0, 1))
    assert receipt.details["judged"] == [world.case.states(world.extract, i).digest() for i in (0, 1)]
    assert sorted(receipt.details["layers"]) == ["0", "1", "3"]
    assert not [p for p in world.case.cache.rglob("states-*")]


@pytest.mark.parametrize("family", ["lfm2", "gemma3", "qwen3_5"])
def test_no_false_alarm_where_tokens_and_contexts_repeat(family: str, tmp_path: Path) -> None:
    """Layers with a short window, runs of one token, shared prefixes and repeated phrases give equal states rightly."""
    case = StatesCase(tmp_path, build(family, tmp_path / "target"), {"layer_ids": [0, 1]})
    phrase, rest = (s.input_ids for s in make_samples((20, 13)))
    texts = [np.full(60, 7), np.tile(phrase, 3), phrase, np.concatenate([phrase, rest])]
    samples = [make_sample(text) for text in texts]
    extract = case.run("extract", {"target": [case.target()], "tokens": [case.tokens(samples)]})
    assert case.run("verify", {"extract": [extract]}).details["verdict"] == "pass"


def test_zeroed_states_are_named_by_shard_sample_and_layer(world: World) -> None:
    """EXT-01."""

    def zero(tensors: dict[str, np.ndarray]) -> None:
        tensors["hidden_states"][:, 1] = 0

    faults = world.forged(zero)
    found = {(f.sample, f.layer) for f in faults if f.kind == "zero"}
    assert found == {(world.name(i), 1) for i in range(len(LENGTHS))}
    assert {f.shard for f in faults} == {world.keys[0]}


def test_one_nan_is_found(world: World) -> None:
    """EXT-02: in the last layer of the last token of one sample."""

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["hidden_states"][rows(3).stop - 1, 2, 5] = np.nan

    [fault] = [f for f in world.forged(spoil) if f.kind == "not_finite"]
    assert (fault.sample, fault.layer) == (world.name(3), 3)
    assert fault.detail == "1 NaN and 0 infinite values, the first in row 29"


def test_infinity_is_counted_apart(world: World) -> None:
    """INT-02."""

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["hidden_states"][rows(1).start + 17, 0, 63] = -np.inf

    [fault] = [f for f in world.forged(spoil) if f.kind == "not_finite"]
    assert (fault.sample, fault.layer) == (world.name(1), 0)
    assert fault.detail == "0 NaN and 1 infinite values, the first in row 17"


def test_values_whose_squares_overflow_are_not_called_infinite(world: World) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["hidden_states"][0, 0, 0] = 3e38

    assert "not_finite" not in {f.kind for f in world.forged(spoil)}


def test_constant_rows_are_found(world: World) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["hidden_states"][rows(4).start + 2, 1] = 0.5

    [fault] = [f for f in world.forged(spoil) if f.kind == "constant"]
    assert (fault.sample, fault.layer, fault.detail) == (world.name(4), 1, "1 of 12 rows, the first is row 2")


def test_a_duplicated_row_is_found(world: World) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        hidden = tensors["hidden_states"]
        hidden[rows(1).start + 9] = hidden[rows(1).start + 8]

    kinds = {f.kind: f for f in world.forged(spoil)}
    assert kinds["duplicate_rows"].sample == world.name(1)
    assert "the first is row 9 = row 8" in kinds["duplicate_rows"].detail
    assert kinds["digest"].sample == world.name(1)


def test_states_of_another_sample_are_found_even_with_fitting_digests(world: World) -> None:
    """EXT-04: a producer that returns one request's states for another (same length)."""

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["hidden_states"][rows(3)] = tensors["hidden_states"][rows(1)]
        tensors["layer_digest"][3] = tensors["layer_digest"][1]

    faults = world.forged(spoil)
    assert {(f.kind, f.sample) for f in faults} == {
        ("duplicate_sample", world.name(3)),
        ("duplicate_rows", world.name(3)),
    }


def test_swapped_states_are_found_by_the_devices_digest(world: World) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        hidden = tensors["hidden_states"]
        hidden[rows(1)], hidden[rows(3)] = hidden[rows(3)].copy(), hidden[rows(1)].copy()

    assert {(f.kind, f.sample) for f in world.forged(spoil)} == {("digest", world.name(1)), ("digest", world.name(3))}


def test_a_changed_low_bit_is_found_by_the_devices_digest(world: World) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["hidden_states"].view(np.int32)[rows(6).start, 2, 40] ^= 1

    [fault] = world.forged(spoil)
    assert (fault.kind, fault.sample, fault.layer) == ("digest", world.name(6), 3)


def test_a_sample_of_another_scale_is_found(world: World) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["hidden_states"][rows(5), 1] *= 100

    kinds = {(f.kind, f.sample, f.layer) for f in world.forged(spoil)}
    assert ("outlier", world.name(5), 1) in kinds


@pytest.mark.parametrize(("name", "kind"), [("input_ids", "token_ids"), ("loss_mask", "loss_mask")])
def test_token_ids_and_masks_must_equal_the_token_shard(world: World, name: str, kind: str) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][rows(2).start + 1] ^= 1

    [fault] = world.forged(spoil)
    assert (fault.kind, fault.sample) == (kind, world.name(2))
    assert fault.detail.startswith("row 1 is ")


def test_a_wrong_sample_id_is_found(world: World) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["sample_id"][4] += 1

    assert [(f.kind, f.sample) for f in world.forged(spoil)] == [("sample_id", world.name(4))]


def test_a_moved_boundary_is_found_with_both_numbers(world: World) -> None:
    """EXT-05: never padded or trimmed to fit."""

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["offsets"][2] -= 1

    details = {f.sample: f.detail for f in world.forged(spoil) if f.kind == "rows"}
    assert details[world.name(1)] == "30 token ids, 29 rows"
    assert details[world.name(2)] == "4 token ids, 5 rows"


def test_a_shard_cut_to_a_prefix_is_refused(tmp_path: Path, dense: Path) -> None:
    """INT-01: states of the first 10 of 50 tokens."""
    case = StatesCase(tmp_path, dense, {"layer_ids": [1]})
    whole = make_samples((50,))
    short = [make_sample(whole[0].input_ids[:10])]
    target, tokens, cut = case.target(), case.tokens(whole), case.tokens(short)
    extract = case.run("extract", {"target": [target], "tokens": [tokens]})
    other = case.run("extract", {"target": [target], "tokens": [cut]})
    case.path(case.states(extract).objects[0]).write_bytes(case.path(case.states(other).objects[0]).read_bytes())
    with pytest.raises(FaultsFound) as raised:
        case.run("verify", {"extract": [case.resign(extract)]})
    details = {f.kind: f.detail for f in raised.value.faults}
    assert details["rows"] == "50 token ids, 10 rows"
    assert "tokens" in details["header"]


@pytest.mark.parametrize(
    ("damage", "kinds"),
    [
        (lambda data: data + b"\0" * 16, {"size", "sha256", "unreadable"}),  # INT-03
        (lambda data: data[:-64], {"size", "sha256", "unreadable"}),
        (lambda data: data[:100], {"size", "sha256", "unreadable"}),
        (lambda data: b"", {"size", "sha256", "unreadable"}),
        (lambda data: data[:-9000] + bytes([data[-9000] ^ 4]) + data[-8999:], {"sha256", "digest"}),
    ],
)
def test_damage_at_rest_is_found(world: World, damage: Callable[[bytes], bytes], kinds: set[str]) -> None:
    path = world.object_path(1)
    path.write_bytes(damage(path.read_bytes()))
    faults = world.faults()
    assert {f.kind for f in faults} == kinds
    assert {f.shard for f in faults} == {world.keys[1]}


def test_every_single_bit_flip_is_found(world: World) -> None:
    path = world.object_path(0)
    whole, random = path.read_bytes(), np.random.default_rng(0)
    for _ in range(12):
        place, bit = int(random.integers(len(whole))), int(random.integers(8))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        assert "sha256" in {f.kind for f in world.faults()}, f"bit {bit} of byte {place}"
    path.write_bytes(whole)
    assert world.case.run("verify", {"extract": [world.extract]}).counts["faults"] == 0


def test_lost_objects_and_receipts_are_found(world: World) -> None:
    world.object_path(0).unlink()
    world.case.store.delete(f"states/{world.keys[1]}/receipt.json")
    assert {(f.shard, f.kind) for f in world.faults()} == {(key, "missing") for key in world.keys}


def test_states_of_another_spec_are_stale(world: World, tmp_path: Path, dense: Path) -> None:
    """A shard of another run of layers under this group's name, and one whose receipt was changed to fit."""
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other", dense, layer_ids=[0, 2, 3])
    world.object_path(0).write_bytes(other.object_path(0).read_bytes())
    foreign = other.case.states(other.extract)
    stale = world.case.resign(world.extract, spec=foreign.spec, details=foreign.details)
    faults = world.faults(stale)
    assert {f.kind for f in faults} == {"stale"}
    assert any("layer_ids: found [0, 2, 3], expected [0, 1, 3]" in f.detail for f in faults)
    own = world.case.states(world.extract, 1)
    faked = world.case.resign(world.extract, details={**own.details, "tokens_key": world.tokens[0].key}, spec=own.spec)
    assert any(f.kind == "header" and "layer_ids" in f.detail for f in world.faults(faked))


def test_a_replaced_receipt_is_found(world: World) -> None:
    path = world.object_path(0)
    change_tensors(path, lambda tensors: tensors["hidden_states"].fill(1))
    states = world.case.states(world.extract)
    resigned = world.case.states(world.case.resign(world.extract))
    assert resigned.digest() != states.digest()
    # The group's receipt still names the old one.
    world.case.store.write(f"extract/{world.extract.key}/receipt.json", world.extract.to_bytes())
    assert [f.kind for f in world.faults()] == ["receipt"]


def test_all_faults_are_collected_and_only_those_shards_are_extracted_again(world: World) -> None:
    change_tensors(world.object_path(1), lambda tensors: tensors["hidden_states"].__setitem__((3, 1, 2), np.nan))
    healthy = world.case.states(world.extract, 0).digest()
    assert {f.shard for f in world.faults()} == {world.keys[1]}
    assert repair_run(world.case.store, "test") == [world.keys[1]]
    assert read_faults(world.case.store, "test") == []
    again = world.case.run("extract", {"target": [world.target], "tokens": world.tokens})
    assert again.counts["reused"] == 1
    assert world.case.states(again, 0).digest() == healthy
    assert world.case.run("verify", {"extract": [again]}).counts["faults"] == 0
