"""`train`: the drafter, from verified hidden states only.

Resumes from its newest whole checkpoint. If it is killed: a retry repeats the steps since then, with the same result.
The best weights by replayed acceptance on the reference texts become the artifact.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.contract.errors import IntegrityError
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.data.states_shard import StatesSample
from tasks.data.token_shard import read_token_shard
from tasks.decoding.reference_file import read_reference
from tasks.decoding.replay import ReferenceSequence, replay_acceptance
from tasks.drafter.batches import SampleAddress, ShardIndex, StatesSource, make_rows
from tasks.drafter.checkpoint import Checkpoints
from tasks.drafter.config import DrafterConfig
from tasks.drafter.figures import acceptance_figure, loss_figure
from tasks.drafter.model import DFlashDrafter
from tasks.drafter.serialization import save_drafter
from tasks.drafter.target_ends import read_target_ends
from tasks.drafter.trainer import Training
from tasks.stages.context import StageContext, new_attempt
from tasks.target.loading import compute_dtype, target_folder

log = logging.getLogger("tasks")


def run(ctx: StageContext) -> Receipt:
    """Train and publish the drafter.

    Raises:
        DataError: if there is nothing to train on.
        TrainingDiverged: if loss or gradients are not finite.
    """
    check = ctx.receipt("check")
    _require_pass(check)
    target = ctx.receipt("target")
    facts = target.details
    config = DrafterConfig.from_spec(
        ctx.spec, hidden_size=facts["hidden_size"], num_target_layers=facts["num_layers"], vocab_size=facts["vocab_size"]
    )
    drafter = DFlashDrafter(config).initialize(ctx.spec.seed).to(ctx.device)
    embedding, head = _target_ends(ctx, target)
    shards = [entry for entry in check.details["shards"] if entry["split"] == "train"]
    references = _references(ctx)
    checkpoints = Checkpoints(ctx.store, ctx.request.key(), new_attempt())
    parameters = sum(p.numel() for p in drafter.parameters())
    log.info(
        "drafter: %s parameters, block %d, layers %s; %d shards, %d reference texts", f"{parameters:,}",
        config.block_size, list(config.target_layer_ids), len(shards), len(references),
    )  # fmt: skip
    training = Training(
        spec=ctx.spec,
        drafter=drafter,
        embedding=embedding,
        head=head,
        shards=[_index(ctx, entry) for entry in shards],
        read=_reader(ctx, shards),
        evaluate=lambda model: _evaluate(model, embedding, head, references),
        log_metrics=lambda metrics, step: ctx.tracker.log_metrics(metrics, step),
        checkpoints=checkpoints,
        device=ctx.device,
    )
    with ctx.progress(training.total_steps, "steps", "train") as progress:
        training.on_step = lambda metrics: progress.add(
            training.state.step - progress.done, loss=metrics["train/loss"],
            tokens_per_second=metrics["train/tokens_per_second"],
        )  # fmt: skip
        training.run()
    receipt = _publish(ctx, training, parameters)
    checkpoints.remove_all()
    return receipt


def _require_pass(check: Receipt) -> None:
    if check.details.get("verdict") != "pass":
        raise IntegrityError(f"check/{check.key}: verdict {check.details.get('verdict')!r}, expected 'pass'")


def _target_ends(ctx: StageContext, target: Receipt) -> tuple[Tensor, Tensor]:
    facts = target.details
    folder = target_folder(ctx, target)
    embedding, head = read_target_ends(folder, facts["tied"], facts["model_type"], facts["hidden_size"])
    dtype = compute_dtype(ctx.spec.compute_dtype, ctx.device)
    same = head is embedding
    embedding = embedding.to(ctx.device, dtype)
    return embedding, embedding if same else head.to(ctx.device, dtype)


def _references(ctx: StageContext) -> list[ReferenceSequence]:
    receipt = ctx.receipt("reference")
    names = sorted(o.name for o in receipt.objects if o.name.endswith(".safetensors"))
    return read_reference([ctx.fetch(receipt, name) for name in names])


def _index(ctx: StageContext, entry: dict[str, Any]) -> ShardIndex:
    tokens = ctx.load(ReceiptRef(**entry["tokens"]))
    shard = read_token_shard(ctx.fetch(tokens, "tokens.safetensors"))
    return ShardIndex(tokens.key, tuple(len(sample.input_ids) for sample in shard.samples))


def _reader(ctx: StageContext, entries: list[dict[str, Any]]) -> StatesSource:
    def fetch(number: int) -> list[Path]:
        receipt = ctx.load(ReceiptRef(**entries[number]["states"]))
        return [ctx.fetch(receipt, stored.name) for stored in receipt.objects]

    return StatesSource(fetch)


def _evaluate(
    drafter: DFlashDrafter, embedding: Tensor, head: Tensor, references: list[ReferenceSequence]
) -> dict[str, float]:
    count = replay_acceptance(drafter, head, embedding, references)
    figures = {"replay_acceptance_length": count.acceptance_length if count.steps else 1.0}
    return figures


def _publish(ctx: StageContext, training: Training, parameters: int) -> Receipt:
    state, spec = training.state, ctx.spec
    folder = ctx.scratch()
    training.drafter.load_state_dict(state.best_weights)
    dtype = torch.float32 if spec.compute_dtype == "float32" else torch.bfloat16
    save_drafter(training.drafter, folder, dtype)
    writer = ctx.writer()
    for name in ("config.json", "model.safetensors"):
        writer.add(f"drafter/{name}", folder / name)
    writer.add("history.jsonl", "".join(json.dumps(line) + "\n" for line in state.history).encode())
    ctx.figure(writer, loss_figure(state.history), "training_loss.png")
    ctx.figure(writer, acceptance_figure(state.history), "replay_acceptance.png")
    last = state.history[-1]["metrics"]
    return ctx.publish(
        writer,
        counts={
            "steps": state.step,
            "samples": sum(len(shard.lengths) for shard in training.shards),
            "tokens": sum(sum(shard.lengths) for shard in training.shards),
            "parameters": parameters,
        },
        metrics={"loss": last["train/loss"], "replay_acceptance_length": state.best_acceptance},
        details={"best_step": state.best_step, "config": training.drafter.config.to_json()},
    )
