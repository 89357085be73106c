from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tasks.contract.errors import DataError, DecodingMismatch
from tasks.contract.receipt import Receipt
from tasks.decoding.acceptance import AcceptanceCount, NoVerificationSteps
from tasks.decoding.reference_file import read_reference
from tasks.decoding.replay import ReferenceSequence
from tasks.drafter.serialization import save_drafter
from tasks.stages import measure as stage
from tasks.target.loading import load_target_folder
from tasks.tracking import NullTracker
from tests.tasks.decoding.drafters import tiny_drafter, train_briefly
from tests.tasks.stages.decoding_runs import LAYER_IDS, PROMPTS, DecodingRun

BLOCK = 4


class Recorder(NullTracker):
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.files: list[str] = []
        self.texts: dict[str, str] = {}

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(values, step)
        self.metrics.update(values)

    def log_text(self, text: str, path: str) -> None:
        self.texts[path] = text

    def log_file(self, file: Path, folder: str = "") -> None:
        self.files.append(f"{folder}/{file.name}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DecodingRun:
    return DecodingRun(tmp_path_factory.mktemp("measure"))


@pytest.fixture(scope="module")
def reference(run: DecodingRun) -> Receipt:
    return run.reference()


def _train(run: DecodingRun, reference: Receipt, key: str, *, steps: int, layer_ids: list[int] = LAYER_IDS) -> Receipt:
    """A receipt as stage `train` writes it."""
    target = load_target_folder(run.target_folder)
    drafter = tiny_drafter(target, layer_ids, BLOCK)
    if steps:
        train_briefly(drafter, target, _sequences(run, reference), steps)
    folder = run.folder / f"drafter-{key}"
    save_drafter(drafter, folder)
    names = ("config.json", "model.safetensors")
    return run.forge("train", key, {f"drafter/{name}": folder / name for name in names})


def _sequences(run: DecodingRun, reference: Receipt) -> list[ReferenceSequence]:
    return read_reference(run.path(reference, "reference.safetensors"))


def _measure(run: DecodingRun, train: Receipt, reference: Receipt, tracker: NullTracker | None = None) -> Receipt:
    return run.run("measure", {"target": [run.target], "train": [train], "reference": [reference]}, tracker)


def test_a_trained_drafter_is_measured_checked_and_shown(run: DecodingRun, reference: Receipt) -> None:
    tracker = Recorder()
    receipt = _measure(run, _train(run, reference, "good", steps=60), reference, tracker)
    metrics, details = receipt.metrics, receipt.details
    counts = json.loads(run.path(receipt, "acceptance.json").read_text())
    overall = AcceptanceCount.from_json(counts["overall"])
    assert metrics["acceptance_length"] == overall.emitted / overall.steps == overall.acceptance_length
    assert 1.3 < metrics["acceptance_length"] <= BLOCK
    assert metrics["acceptance_length_low"] <= metrics["acceptance_length"] <= metrics["acceptance_length_high"]
    assert metrics["mean_of_prompt_acceptance"] == overall.mean_of_prompt_means
    assert metrics["replay_equals_decoding"] == 1.0
    assert metrics["replay_acceptance_length"] == metrics["acceptance_length"]
    assert details["lossless"] is True
    assert details["losslessness"]["equal_texts"] == len(PROMPTS)
    assert metrics["speedup"] == pytest.approx(
        metrics["tokens_per_second_drafter"] / metrics["tokens_per_second_plain"]
    )
    shares = [metrics[f"{part}_share"] for part in ("draft", "verify", "rollback")]
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0  # a hybrid target: rollback costs something
    assert metrics["accepted_share_position_01"] >= metrics["accepted_share_position_03"]
    # Slices, sums, prompts.
    slices = {name: AcceptanceCount.from_json(value) for name, value in counts["slices"].items()}
    assert slices["code"] + slices["chat"] == overall or slices["chat"] + slices["code"] == overall
    assert details["slices"]["code"]["prompts"] == 2
    assert details["slices"]["chat"]["acceptance_length"] == slices["chat"].acceptance_length
    assert tracker.metrics["measure/slice/code/acceptance_length"] == slices["code"].acceptance_length
    lines = [json.loads(line) for line in run.path(receipt, "prompts.jsonl").read_text().splitlines()]
    assert [line["prompt_id"] for line in lines] == [prompt["prompt_id"] for prompt in PROMPTS]
    assert sum(sum(line["emitted"]) for line in lines) == receipt.counts["emitted_tokens"] == overall.emitted
    assert all(sum(line["emitted"]) == line["answer_tokens"] - 1 for line in lines)
    assert sum(len(line["accepted"]) for line in lines) == receipt.counts["steps"]
    # What people look at.
    plots = ["accepted_by_position.png", "accepted_per_step.png", "acceptance_by_slice.png"]
    assert tracker.files == [f"plots/{name}" for name in plots]
    assert {f"figures/{name}" for name in plots} < {stored.name for stored in receipt.objects}
    page = tracker.texts["measure/prompts.html"]
    assert page == run.path(receipt, "prompts.html").read_text()
    assert "class='draft" in page
    settings = details["settings"]
    assert (settings["block_size"], settings["temperature"], settings["thinking"]) == (BLOCK, 0.0, "off")
    assert len(settings["prompt_set"]) == 64


def test_a_random_drafter_is_lossless_and_the_reason_is_said(
    run: DecodingRun, reference: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ACC-04, ACC-13. The drafter sees states in the stored dtype."""
    seen = []
    decode = stage.speculative_decode

    def listening(*args: object, **kwargs: object) -> object:
        seen.append(kwargs["states_dtype"])
        return decode(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "speculative_decode", listening)
    receipt = _measure(run, _train(run, reference, "random", steps=0), reference)
    assert 1.0 <= receipt.metrics["acceptance_length"] < 1.1
    assert receipt.details["lossless"] is True
    assert set(seen) == {torch.float32}
    assert any("nearly 1.0" in note for note in receipt.details["notes"])


def test_a_text_that_is_not_the_targets_fails_by_name(
    run: DecodingRun, reference: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback that leaves rejected tokens in the recurrent state."""
    from tasks.decoding import cache_rollback

    monkeypatch.setattr(cache_rollback._Recurrent, "restore", lambda self, fed: None)
    monkeypatch.setattr(stage, "probe_verification", lambda *_: _Block())
    with pytest.raises(DecodingMismatch, match=r"prompt \w+: answer token \d+ \(position \d+\) is token"):
        _measure(run, _train(run, reference, "random", steps=0), reference)


class _Block:
    verification = "block"


def test_bfloat16_is_checked_within_the_margin(tmp_path: Path) -> None:
    """ACC-12."""
    run = DecodingRun(tmp_path, compute_dtype="bfloat16", states_dtype="bfloat16", max_new_tokens=12)
    reference = run.reference(PROMPTS[:1])
    receipt = _measure(run, _train(run, reference, "random", steps=0), reference)
    check = receipt.details["losslessness"]
    assert check["method"] == "teacher forcing within a logit margin"
    assert check["largest_gap"] <= check["margin"]
    assert receipt.counts["near_ties"] == check["near_ties"]


def test_no_verification_step_is_an_error(tmp_path: Path) -> None:
    run = DecodingRun(tmp_path, max_new_tokens=1)
    reference = run.reference()
    with pytest.raises(NoVerificationSteps, match="0 steps in 3 prompts"):
        _measure(run, _train(run, reference, "random", steps=0), reference)


def test_a_drafter_of_other_layers_is_refused(run: DecodingRun, reference: Receipt) -> None:
    train = _train(run, reference, "layers", steps=0, layer_ids=[0, 3, 5])
    with pytest.raises(DataError, match=r"layer ids \[0, 3, 5\], reference has \[1, 4, 6\]"):
        _measure(run, train, reference)
