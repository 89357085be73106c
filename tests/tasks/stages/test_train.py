from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.chain import Chain, run_chain
from tasks.contract.errors import IntegrityError
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.contract.request import RunContext, StageRequest
from tasks.contract.spec import RunSpec
from tasks.decoding.replay import replay_acceptance
from tasks.drafter.objective import Objective
from tasks.drafter.serialization import load_drafter
from tasks.drafter.target_ends import read_target_ends
from tasks.stages import train as stage
from tasks.stages.context import StageContext
from tasks.stages.reference import open_reference
from tasks.storage.artifact import fetch_object, read_receipt, remove_artifact
from tasks.storage.folder import FolderStore
from tasks.target.loading import load_target_folder
from tasks.target.tiny_hybrid import SAMPLE_ROWS, write_tiny_hybrid
from tasks.tracking import NullTracker

FIELDS: dict[str, Any] = {
    "max_length": 256, "validation_share": 0.3, "shard_tokens": 256, "layer_count": 3, "block_size": 4,
    "draft_layers": 2, "sliding_layers": 1, "sliding_window": 16, "batch_tokens": 200, "anchors": 8, "epochs": 2,
    "max_new_tokens": 12, "measure_prompts": 2, "device": "cpu", "compute_dtype": "float32",
    "states_dtype": "float32", "smoke_hybrid": False, "checkpoint_steps": 2, "evaluate_steps": 3,
}  # fmt: skip


class Prepared:
    """The chain up to `reference` on a tiny hybrid, and a way to train on it."""

    def __init__(self, folder: Path) -> None:
        rows = folder / "rows.jsonl"
        rows.write_text("\n".join(json.dumps(row) for row in SAMPLE_ROWS) + "\n")
        self.folder, self.target_folder = folder, write_tiny_hybrid(folder / "target")
        self.store = FolderStore(folder / "store")
        spec = RunSpec(target=str(self.target_folder), sources=[str(rows)], **FIELDS)
        results = run_chain(
            spec, self.store.root, "test", until="reference", store=self.store, tracker=NullTracker(),
            cache=folder / "cache", smoke=False,
        )  # fmt: skip
        self.results = {name: receipts[0] for name, receipts in results.items()}
        self.spec = RunSpec(**self.results["plan"].details["spec"])

    def context(self, tracker: Any = None, **fields: Any) -> StageContext:
        request = StageRequest(
            stage="train",
            store=self.store.root,
            spec=self.spec.model_copy(update=fields),
            inputs={name: [self.results[name].ref()] for name in ("target", "check", "reference")},
            run=RunContext(run_id="test", task="train"),
        )
        return StageContext(request, self.store, tracker or NullTracker(), cache=self.folder / "cache")

    def train(self, tracker: Any = None, **fields: Any) -> Receipt:
        with self.context(tracker, **fields) as ctx:
            return stage.run(ctx)

    def path(self, receipt: Receipt, name: str) -> Path:
        return fetch_object(self.store, receipt, name, self.folder / "cache")

    def store_receipt(self, ref: dict[str, Any]) -> Receipt:
        return read_receipt(self.store, ref["kind"], ref["key"])

    def history(self, receipt: Receipt) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path(receipt, "history.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    torch.set_num_threads(1)
    return Prepared(tmp_path_factory.mktemp("train"))


class Recorder(NullTracker):
    def __init__(self) -> None:
        self.points: list[tuple[int | None, dict[str, float]]] = []
        self.files: list[str] = []

    def log_metrics(self, values: Any, step: int | None = None) -> None:
        super().log_metrics(values, step)
        self.points.append((step, dict(values)))

    def log_file(self, file: Path, folder: str = "") -> None:
        self.files.append(f"{folder}/{file.name}")


def test_a_drafter_is_trained_and_published(prepared: Prepared) -> None:
    recorder = Recorder()
    receipt = prepared.train(recorder)
    folder = prepared.folder / "published"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(prepared.path(receipt, f"drafter/{name}").read_bytes())
    drafter = load_drafter(folder)
    assert drafter.config.layer_types == ("sliding_attention", "full_attention")
    assert drafter.config.target_layer_ids == tuple(prepared.spec.layer_ids or ())
    assert receipt.details["config"]["dflash_config"]["mask_token_id"] == prepared.spec.mask_token
    assert receipt.details["parameters"] == sum(p.numel() for p in drafter.parameters())
    history = prepared.history(receipt)
    assert [line["step"] for line in history] == list(range(1, receipt.counts["steps"] + 1))
    logged: dict[int | None, dict[str, float]] = {}
    for step, values in recorder.points:
        logged.setdefault(step, {}).update(values)
    assert logged == {line["step"]: line["metrics"] for line in history}
    assert sorted(recorder.files) == [
        "plots/replay_acceptance.png", "plots/training_accuracy.png", "plots/training_loss.png",
    ]  # fmt: skip
    train = [e for e in prepared.results["check"].details["shards"] if e["split"] == "train"]
    counted = sum(prepared.store_receipt(e["tokens"]).counts["samples"] for e in train)
    assert receipt.counts["samples"] + receipt.counts["samples_left_out"] == counted > 0
    # Nothing but the artifact is left.
    assert not [info.path for info in prepared.store.list("train/") if "checkpoint" in info.path]
    assert not list(prepared.store.list(f"train/{receipt.key}/latest"))


def test_the_replayed_acceptance_is_that_of_the_published_weights(prepared: Prepared) -> None:
    receipt = prepared.train()
    best = next(line["metrics"] for line in prepared.history(receipt) if line["step"] == receipt.details["best_step"])
    with prepared.context() as ctx:
        references = open_reference(ctx, ctx.receipt("reference"))
    folder = prepared.folder / "again"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(prepared.path(receipt, f"drafter/{name}").read_bytes())
    target = load_target_folder(prepared.target_folder)
    count = replay_acceptance(load_drafter(folder).eval(), target.head.weight, target.embedding.weight, references)
    assert count.acceptance_length == receipt.metrics["replay_acceptance_length"]
    assert count.acceptance_length == best["train/replay_acceptance_length"]
    assert receipt.metrics["validation_loss"] == best["train/validation_loss"]


class Killed(BaseException):
    """Like SIGKILL: nothing handles it."""


def test_a_killed_training_goes_on_to_the_same_drafter(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = prepared.train(learning_rate=2e-3)
    wanted = load_file(prepared.path(expected, "drafter/model.safetensors"))
    untimed = [_untimed(line) for line in prepared.history(expected)]
    remove_artifact(prepared.store, "train", expected.key)
    accumulate, calls = Objective.accumulate, 0

    def dying(self: Objective, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Killed
        return accumulate(self, *args)

    monkeypatch.setattr(Objective, "accumulate", dying)
    with pytest.raises(Killed):
        prepared.train(learning_rate=2e-3)
    resumed = prepared.train(learning_rate=2e-3)
    assert calls == 4 + expected.counts["steps"] - 2  # three steps, the fourth died, from the checkpoint at 2 on
    assert resumed.key == expected.key
    found = load_file(prepared.path(resumed, "drafter/model.safetensors"))
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert [_untimed(line) for line in prepared.history(resumed)] == untimed


def _untimed(line: dict[str, Any]) -> dict[str, Any]:
    timed = ("per_second", "wait_share", "step_seconds")
    return {"step": line["step"], **{n: v for n, v in line["metrics"].items() if not n.endswith(timed)}}


def test_nothing_but_a_passing_check_is_trained_on(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    load = StageContext.load

    def failing(self: StageContext, ref: ReceiptRef) -> Receipt:
        receipt = load(self, ref)
        if receipt.kind == "check":
            receipt = receipt.model_copy(update={"details": {**receipt.details, "verdict": "fail"}})
        return receipt

    monkeypatch.setattr(StageContext, "load", failing)
    with pytest.raises(IntegrityError, match="found verdict 'fail', expected 'pass'"):
        prepared.train()


def test_states_of_other_layers_are_refused(prepared: Prepared) -> None:
    """EXT-07."""
    with pytest.raises(IntegrityError, match=r"found layer ids \[.*\], expected \[0, 1, 2\]"):
        prepared.train(layer_ids=[0, 1, 2])


# ---- embedding and head ---------------------------------------------------------------------------------------------


def test_embedding_and_head_are_those_of_the_loaded_target(prepared: Prepared) -> None:
    target = load_target_folder(prepared.target_folder)
    tied = bool(target.config.tie_word_embeddings)
    embedding, head = read_target_ends(
        prepared.target_folder, tied=tied, model_type="qwen3_5_text", hidden_size=64, dtype=torch.float32
    )
    assert torch.equal(embedding, target.embedding.weight)
    assert torch.equal(head, target.head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_embedding_is_read_as_blocks_are_fed(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=40, pad_token_id=0,
    )  # fmt: skip
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    model = Gemma3ForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    embedding, head = read_target_ends(
        tmp_path, tied=True, model_type="gemma3_text", hidden_size=24, dtype=dtype
    )  # fmt: skip
    assert torch.equal(embedding, model.get_input_embeddings()(torch.arange(40)))
    assert torch.equal(head, model.get_output_embeddings().weight)


def test_tensors_of_another_name_are_found_in_the_loaded_model(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.drafter import target_ends

    monkeypatch.setattr(target_ends, "_EMBEDDINGS", ("unusual.weight",))
    target = load_target_folder(prepared.target_folder)
    embedding, head = read_target_ends(
        prepared.target_folder, tied=False, model_type="qwen3_5_text", hidden_size=64, dtype=torch.float32
    )
    assert torch.equal(embedding, target.embedding.weight)
    assert torch.equal(head, target.head.weight)


def test_the_chain_knows_the_stage(prepared: Prepared) -> None:
    """By the way of the chain the very same receipt is found."""
    first = prepared.train()
    chain = Chain(prepared.spec, prepared.store.root, "test", prepared.store, NullTracker(), prepared.folder / "cache")
    inputs = {name: [prepared.results[name].ref()] for name in ("target", "check", "reference")}
    assert chain.stage("train", inputs) == first
