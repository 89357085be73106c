from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.contract.errors import ConfigurationError, Interrupted
from tasks.contract.receipt import Receipt
from tasks.data.repair import drop_states
from tasks.data.state_digest import row_digests, sample_digests
from tasks.data.states_shard import StatesShard
from tasks.stages import extract as stage
from tasks.storage.artifact import find_receipt
from tasks.target.loading import load_target_folder
from tasks.target.plain import plain_states
from tests.tasks.stages.states_case import StatesCase, make_samples
from tests.tasks.target.families import build


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_5", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture
def case(tmp_path: Path, hybrid: Path) -> StatesCase:
    return StatesCase(tmp_path, hybrid)


def shards(case: StatesCase, count: int = 2) -> list[Receipt]:
    return [case.tokens(make_samples((9, 30, 4, 17, 12), seed)) for seed in range(count)]


def test_a_group_is_extracted_shard_by_shard_and_found_again(
    case: StatesCase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    target, tokens = case.target(), shards(case)
    receipt = case.run("extract", {"target": [target], "tokens": tokens})
    assert receipt.counts == {"shards": 2, "samples": 10, "tokens": 144, "reused": 0}
    assert "[2, 4, 6] as indices of Hugging Face's hidden_states" in caplog.text
    assert [e["tokens"]["key"] for e in receipt.details["shards"]] == [t.key for t in tokens]
    states = case.states(receipt)
    assert states.counts == {"samples": 5, "tokens": 72}
    expected = {"layer_ids": [1, 3, 5], "layer_convention": "layer_output", "last_hidden": "none", "dtype": "float32"}
    assert {name: states.details[name] for name in expected} == expected
    assert states.details["linear_attention"] == "pytorch"
    assert not list(case.cache.rglob("states-*")), "states must not fill the local cache"

    opened = load_target_folder(case.target_folder)
    for found, sample in zip(
        StatesShard([case.path(states.objects[0])]), make_samples((9, 30, 4, 17, 12), 0), strict=True
    ):
        assert np.array_equal(found.sample.input_ids, sample.input_ids)
        assert found.sample.sample_id == sample.sample_id
        plain = plain_states(opened, sample.input_ids)
        for column, layer in enumerate((1, 3, 5)):
            assert (found.hidden_states[:, column] - plain.entries[layer + 1]).abs().max() < 1e-4
        assert torch.equal(sample_digests(row_digests(found.hidden_states)[None])[0], found.layer_digest)

    # One more shard: only that one is extracted. Nothing waiting: the target is not even loaded.
    third = case.tokens(make_samples((8, 6), 9))
    again = case.run("extract", {"target": [target], "tokens": [*tokens, third]})
    assert again.counts["reused"] == 2
    monkeypatch.setattr(stage, "open_target", None)
    assert case.run("extract", {"target": [target], "tokens": [third]}).counts["reused"] == 1


def test_a_shard_does_not_depend_on_its_group(tmp_path: Path, hybrid: Path) -> None:
    digests = []
    for name, alone in (("alone", True), ("together", False)):
        case = StatesCase(tmp_path / name, hybrid)
        (tmp_path / name).mkdir(exist_ok=True)
        target, tokens = case.target(), shards(case)
        receipt = case.run("extract", {"target": [target], "tokens": tokens[1:] if alone else tokens})
        digests.append(case.states(receipt, 0 if alone else 1).objects[0].sha256)
    assert digests[0] == digests[1]


def test_last_hidden_and_bfloat16(tmp_path: Path, hybrid: Path) -> None:
    case = StatesCase(tmp_path, hybrid, {"last_hidden": "post_norm", "states_dtype": "bfloat16", "layer_ids": [0, 7]})
    target = case.target()
    receipt = case.run("extract", {"target": [target], "tokens": shards(case, 1)})
    [path] = [case.path(o) for o in case.states(receipt).objects]
    shard = StatesShard([path])
    assert (shard.dtype, shard.header.last_hidden, shard.header.layer_ids) == ("bfloat16", "post_norm", (0, 7))
    opened = load_target_folder(case.target_folder)
    plain = plain_states(opened, shard[1].sample.input_ids)
    assert (shard[1].last_hidden.float() - plain.entries[-1]).abs().max() < 0.02
    assert plain.error(shard[1].hidden_states[:, 1], 7).largest < 0.01
    verify, prove = case.judge(target, receipt)
    assert verify.details["judged"] == prove.details["judged"] == [case.states(receipt).digest()]


def test_interrupted_between_batches_keeps_finished_shards(case: StatesCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """EXT-21: kill after the first shard, resume; what was finished is not done again."""
    target, tokens = case.target(), shards(case, 3)
    add, seen = stage._Meter.add, []

    def stop(meter: stage._Meter, samples: int, count: int) -> None:
        seen.append(samples)
        if sum(seen) > 7:
            raise Interrupted("SIGTERM")
        add(meter, samples, count)

    with monkeypatch.context() as patch:
        patch.setattr(stage._Meter, "add", stop)
        with pytest.raises(Interrupted):
            case.run("extract", {"target": [target], "tokens": tokens})
    done = list(case.store.list("states/"))
    assert len({info.path.split("/")[1] for info in done}) == 1, "nothing partial is visible"
    before = [(info.path, info.modified) for info in done]
    receipt = case.run("extract", {"target": [target], "tokens": tokens})
    assert receipt.counts == {"shards": 3, "samples": 15, "tokens": 216, "reused": 1}
    assert before == [(i.path, i.modified) for i in case.store.list("states/") if i.path in dict(before)]


def test_repair_extracts_exactly_the_dropped_shards(case: StatesCase) -> None:
    target, tokens = case.target(), shards(case, 3)
    first = case.run("extract", {"target": [target], "tokens": tokens[:2]})
    second = case.run("extract", {"target": [target], "tokens": tokens[2:]})
    keys = [e["states"]["key"] for e in first.details["shards"]]
    kept = case.states(first, 1).digest()
    assert drop_states(case.store, keys[:1]) == [first.key]
    assert find_receipt(case.store, "extract", first.key) is None
    assert find_receipt(case.store, "extract", second.key) is not None
    assert not list(case.store.list(f"states/{keys[0]}/"))
    repaired = case.run("extract", {"target": [target], "tokens": tokens[:2]})
    assert repaired.counts["reused"] == 1
    assert case.states(repaired, 1).digest() == kept


def test_an_unresolved_spec_is_refused(tmp_path: Path, hybrid: Path) -> None:
    case = StatesCase(tmp_path, hybrid, {"layer_ids": None})
    with pytest.raises(ConfigurationError, match="layer_ids"):
        case.run("extract", {"target": [case.target()], "tokens": shards(case, 1)})


def test_ids_beyond_the_target_are_refused_with_the_range(tmp_path: Path, hybrid: Path) -> None:
    case = StatesCase(tmp_path, hybrid, {"layer_ids": [1, 8]})
    with pytest.raises(ConfigurationError, match=r"0\.\.7.*hidden_states"):
        case.run("extract", {"target": [case.target()], "tokens": shards(case, 1)})


_PROGRAM = """
import sys
from pathlib import Path
from tests.tasks.stages.states_case import StatesCase, make_samples
case = StatesCase(Path(sys.argv[1]), Path(sys.argv[2]))
tokens = [case.tokens(make_samples((9, 30, 4, 17, 12), seed)) for seed in range(12)]
print("start", flush=True)
print(case.run("extract", {"target": [case.target()], "tokens": tokens}).counts["reused"])
"""


@pytest.mark.slow
def test_killed_at_any_moment_then_resumed_gives_the_same_bytes(tmp_path: Path, hybrid: Path) -> None:
    random = np.random.default_rng(3)
    objects = []
    for name, kills in (("calm", 0), ("killed", 4)):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-c", _PROGRAM, str(folder), str(hybrid)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        for _ in range(kills):
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "start\n"
            time.sleep(float(random.uniform(0.2, 4)))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
        subprocess.run(command, env=environment, check=True, capture_output=True)
        case = StatesCase(folder, hybrid)
        receipts = [i.path for i in case.store.list("states/") if i.path.endswith("receipt.json")]
        assert len(receipts) == 12
        found = [Receipt.model_validate_json(case.store.read(path)) for path in receipts]
        objects.append({r.key: [o.sha256 for o in r.objects] for r in found})
    assert objects[0] == objects[1]
