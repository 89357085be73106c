"""`train`: the drafter, from verified hidden states only.

Resumes from its newest whole checkpoint. If it is killed: a retry repeats the steps since then, with the same result.
The best weights by replayed acceptance on the reference texts become the artifact.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.contract.errors import IntegrityError
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.data.token_shard import TokenShardFile
from tasks.decoding.replay import ReferenceSequence, replay_acceptance
from tasks.drafter.batches import ShardIndex, StatesSource, index_shard, validation_rows
from tasks.drafter.checkpoint import Checkpoints
from tasks.drafter.config import DrafterConfig
from tasks.drafter.figures import acceptance_figure, accuracy_figure, loss_figure
from tasks.drafter.loss import default_decay
from tasks.drafter.model import DFlashDrafter
from tasks.drafter.objective import Objective
from tasks.drafter.serialization import save_drafter
from tasks.drafter.target_ends import read_target_ends
from tasks.drafter.trainer import Evaluation, Training
from tasks.stages.context import StageContext, new_attempt
from tasks.stages.reference import open_reference
from tasks.target.loading import compute_dtype, target_folder

log = logging.getLogger("tasks")
VALIDATION_SAMPLES, VALIDATION_ANCHORS = 64, 16  # what an evaluation reads at most
REPLAYED_TEXTS = 64


def run(ctx: StageContext) -> Receipt:
    """Train and publish the drafter.

    Objects: `drafter/config.json`, `drafter/model.safetensors`, `history.jsonl`, plots.

    Raises:
        DataError: if there is nothing to train on.
        IntegrityError: if the states are not those of a passing check, of these layers and of the token shards.
        TrainingDiverged: if loss or gradients are not finite.
    """
    spec, check, target = ctx.spec, ctx.receipt("check"), ctx.receipt("target")
    config = DrafterConfig.from_spec(
        spec,
        hidden_size=target.details["hidden_size"],
        num_target_layers=target.details["num_layers"],
        vocab_size=target.details["vocab_size"],
        max_position_embeddings=target.details.get("max_positions"),
    )
    train, validation = _open_split(ctx, check, "train"), _open_split(ctx, check, "validation")
    references = open_reference(ctx, ctx.receipt("reference"))[:REPLAYED_TEXTS]
    drafter = DFlashDrafter(config).initialize(spec.seed).to(ctx.device)
    parameters = sum(p.numel() for p in drafter.parameters())
    checkpoints = Checkpoints(ctx.store, ctx.request.key(), new_attempt())
    training = Training(
        spec=spec,
        drafter=drafter,
        objective=_objective(ctx, target),
        shards=train.shards,
        read=train.read,
        evaluate=lambda model, objective: _evaluate(ctx, model, objective, validation, references),
        log_metrics=lambda metrics, step: ctx.tracker.log_metrics(metrics, step),
        checkpoints=checkpoints,
        device=ctx.device,
    )
    log.info(
        "drafter: %s parameters, block %d, target layers %s; %s samples in %d shards, %d steps, %d reference texts",
        f"{parameters:,}",
        config.block_size,
        list(config.target_layer_ids),
        f"{train.samples:,}",
        len(train.shards),
        training.total_steps,
        len(references),
    )
    with ctx.progress(training.total_steps, "steps", "train") as progress:
        training.on_step = lambda metrics: progress.add(
            training.state.step - progress.done,
            loss=metrics["train/loss"],
            tokens_per_second=metrics["train/tokens_per_second"],
        )
        training.run()
    receipt = _publish(ctx, training, train, parameters)
    checkpoints.remove_all()
    return receipt


# ---- inputs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Split:
    """Shards of one split and how to read their samples."""

    shards: list[ShardIndex]
    read: StatesSource

    @property
    def samples(self) -> int:
        return sum(len(shard.usable) for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.lengths[i] for shard in self.shards for i in shard.usable)

    @property
    def left_out(self) -> int:
        return sum(len(shard.lengths) for shard in self.shards) - self.samples


def _open_split(ctx: StageContext, check: Receipt, split: str) -> _Split:
    if check.details.get("verdict") != "pass":
        raise IntegrityError(
            f"check/{check.key}: found verdict {check.details.get('verdict')!r}, expected 'pass'; training starts on "
            "nothing else"
        )
    entries = [entry for entry in check.details["shards"] if entry["split"] == split]
    shards = [_index(ctx, entry) for entry in entries]

    def fetch(number: int) -> list[Path]:
        states = ctx.load(ReceiptRef(**entries[number]["states"]))
        _require_states(ctx, states)
        return [ctx.fetch(states, stored.name) for stored in states.objects]

    found = _Split(shards, StatesSource(shards, fetch))
    if found.left_out:
        log.info("%s: %d samples without two supervised tokens in a row are left out", split, found.left_out)
    return found


def _index(ctx: StageContext, entry: dict[str, Any]) -> ShardIndex:
    tokens = ctx.load(ReceiptRef(**entry["tokens"]))
    shard = index_shard(tokens.key, TokenShardFile(ctx.fetch(tokens, "tokens.safetensors")))
    if len(shard.lengths) != tokens.counts["samples"]:
        raise IntegrityError(
            f"token shard {tokens.key}: found {len(shard.lengths)} samples, its receipt says {tokens.counts['samples']}"
        )
    return shard


def _require_states(ctx: StageContext, states: Receipt) -> None:
    found = states.details.get("layer_ids")
    if found != ctx.spec.layer_ids:
        raise IntegrityError(f"states/{states.key}: found layer ids {found}, expected {ctx.spec.layer_ids}")


def _objective(ctx: StageContext, target: Receipt) -> Objective:
    facts, spec = target.details, ctx.spec
    embedding, head = read_target_ends(
        target_folder(ctx, target),
        tied=facts["tied"],
        model_type=facts["model_type"],
        hidden_size=facts["hidden_size"],
        dtype=compute_dtype(spec.compute_dtype, ctx.device),
        trust_remote_code=spec.trust_remote_code,
    )
    on_device = head.to(ctx.device)
    embedding = on_device if embedding is head else embedding.to(ctx.device)
    return Objective(embedding, on_device, spec.loss_decay or default_decay(spec.block_size))


# ---- evaluation -----------------------------------------------------------------------------------------------------


def _evaluate(
    ctx: StageContext,
    drafter: DFlashDrafter,
    objective: Objective,
    validation: _Split,
    references: Sequence[ReferenceSequence],
) -> Evaluation:
    """Loss on validation samples, and the acceptance that the drafter as published would have on the reference."""
    spec = ctx.spec
    rows = validation_rows(
        validation.shards,
        validation.read,
        samples=VALIDATION_SAMPLES,
        anchors=min(VALIDATION_ANCHORS, spec.anchors),
        block_size=spec.block_size,
        seed=spec.seed,
    )
    outcome = objective.score(drafter, (row.to(ctx.device) for row in rows))
    metrics: dict[str, float] = {}
    if outcome is not None:
        metrics["train/validation_loss"] = outcome.loss
        metrics |= outcome.accuracies("train/validation_accuracy_position")
    count = replay_acceptance(
        _in_dtype(drafter, objective.head.dtype), objective.head, objective.embedding, references, spec.block_size
    )
    if count.steps:
        metrics["train/replay_acceptance_length"] = count.acceptance_length
        metrics |= {f"train/replay_share_position_{k:02d}": share for k, share in count.share_by_position().items()}
    return Evaluation(
        metrics, metrics.get("train/replay_acceptance_length"), outcome.loss if outcome is not None else None
    )


def _in_dtype(drafter: DFlashDrafter, dtype: torch.dtype) -> DFlashDrafter:
    """The drafter in the dtype of its artifact: itself, or a copy."""
    parameter = next(drafter.parameters())
    if parameter.dtype == dtype:
        return drafter
    copy = DFlashDrafter(drafter.config).to(parameter.device, dtype)
    copy.load_state_dict(drafter.state_dict())  # rounds
    return copy.eval()


# ---- result ---------------------------------------------------------------------------------------------------------


def _publish(ctx: StageContext, training: Training, split: _Split, parameters: int) -> Receipt:
    state, drafter, folder = training.state, training.drafter, ctx.scratch()
    drafter.load_state_dict(state.best_weights)
    save_drafter(drafter, folder, training.objective.head.dtype)
    writer = ctx.writer()
    for name in ("config.json", "model.safetensors"):
        writer.add(f"drafter/{name}", folder / name)
    writer.add("history.jsonl", "".join(json.dumps(line) + "\n" for line in state.history).encode())
    ctx.figure(writer, loss_figure(state.history), "training_loss.png")
    ctx.figure(writer, acceptance_figure(state.history), "replay_acceptance.png")
    ctx.figure(writer, accuracy_figure(state.history), "training_accuracy.png")
    best = next(line["metrics"] for line in state.history if line["step"] == state.best_step)
    metrics = {
        "loss": state.history[-1]["metrics"]["train/loss"],
        "validation_loss": best.get("train/validation_loss"),
        "replay_acceptance_length": best.get("train/replay_acceptance_length"),
    }
    return ctx.publish(
        writer,
        counts={
            "steps": state.step,
            "samples": split.samples,
            "tokens": split.tokens,
            "samples_left_out": split.left_out,
            "parameters": parameters,
        },
        metrics={name: value for name, value in metrics.items() if value is not None},
        details={
            "best_step": state.best_step,
            "parameters": parameters,
            "config": json.loads((folder / "config.json").read_text()),
        },
    )
