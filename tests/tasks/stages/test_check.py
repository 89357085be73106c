from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.contract.errors import IntegrityError
from tasks.contract.receipt import Receipt
from tests.tasks.stages.states_case import StatesCase, make_samples
from tests.tasks.target.families import build


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


class World:
    """Three shards in two groups, extracted and judged."""

    def __init__(self, folder: Path) -> None:
        self.case = StatesCase(folder, build("llama", folder / "target"), {"layer_ids": [0, 2]})
        self.target = self.case.target()
        splits = ("train", "validation", "train")
        self.tokens = [self.case.tokens(make_samples((7, 20), seed), split) for seed, split in enumerate(splits)]
        self.assemble = self.case.assemble(self.tokens)
        # Groups are balanced by tokens, so they do not follow the order of the shards.
        self.groups = [self.extract(2, 0), self.extract(1)]
        judged = [self.case.judge(self.target, group) for group in self.groups]
        self.verified, self.proved = [j[0] for j in judged], [j[1] for j in judged]

    def extract(self, *shards: int) -> Receipt:
        return self.case.run("extract", {"target": [self.target], "tokens": [self.tokens[i] for i in shards]})

    def check(self, **changed: object) -> Receipt:
        inputs = {"assemble": [self.assemble], "extract": self.groups, "verify": self.verified, "prove": self.proved}
        return self.case.run("check", {**inputs, **changed})


def test_one_verdict_over_all_shards_in_the_order_of_assemble(world: World) -> None:
    receipt = world.check()
    assert [e["tokens"]["key"] for e in receipt.details["shards"]] == [t.key for t in world.tokens]
    assert [e["split"] for e in receipt.details["shards"]] == ["train", "validation", "train"]
    assert receipt.details["verdict"] == "pass"
    assert (receipt.counts["samples"], receipt.counts["tokens"], receipt.counts["shards"]) == (6, 81, 3)
    assert receipt.identity != receipt.key
    report = world.case.fetch_text(receipt, "report.md")
    assert report.startswith("# Integrity report: pass")
    assert all(t.key in report for t in world.tokens)
    assert sorted(receipt.details["layers"]) == ["0", "2"]
    assert receipt.details["layers"]["2"]["max_error"] < 1e-4


def test_a_missing_group_is_named(world: World) -> None:
    with pytest.raises(IntegrityError, match=f"token shard {world.tokens[1].key} has no states"):
        world.check(extract=world.groups[:1])


def test_a_shard_in_two_groups_is_named(world: World) -> None:
    twice = world.extract(0)
    with pytest.raises(IntegrityError, match=f"token shard {world.tokens[0].key} has states 2 times"):
        world.check(extract=[*world.groups, twice])


@pytest.mark.parametrize("name", ["verify", "prove"])
def test_states_that_were_not_judged_are_refused(world: World, name: str) -> None:
    receipts = {"verify": world.verified, "prove": world.proved}[name]
    with pytest.raises(IntegrityError, match=f"{world.tokens[1].key}.* were not judged by {name}"):
        world.check(**{name: receipts[:1]})


def test_a_receipt_changed_after_the_verdict_is_refused(world: World) -> None:
    group = world.groups[1]
    changed = json.loads(json.dumps(group.details))
    changed["shards"][0]["states"]["digest"] = "0" * 64
    other = group.model_copy(update={"details": changed, "key": "other"})
    world.case.store.write("extract/other/receipt.json", other.to_bytes())
    with pytest.raises(IntegrityError, match="were not judged by verify"):
        world.check(extract=[world.groups[0], other])


def test_a_foreign_shard_is_refused(world: World) -> None:
    foreign = world.case.tokens(make_samples((5,), 77))
    group = world.case.run("extract", {"target": [world.target], "tokens": [foreign]})
    with pytest.raises(IntegrityError, match=f"states of token shard {foreign.key}, which assemble did not make"):
        world.check(extract=[*world.groups, group])
