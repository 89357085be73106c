"""The training loop: AdamW, warm-up and cosine, clipped gradients, evaluation by replay, checkpoints.

Parameters are float32. On a GPU the forward pass runs under bfloat16 autocast. Everything random is a function of
(seed, epoch, sample), so the position is just the step, and a resumed training on a CPU is bit-identical.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tasks.contract.errors import DataError, Interrupted, TrainingDiverged
from tasks.contract.spec import RunSpec
from tasks.drafter.batches import Row, SampleAddress, ShardIndex, epoch_steps, make_rows, prefetch
from tasks.drafter.checkpoint import Checkpoints, TrainingState, moments
from tasks.drafter.loss import Slots, head_cross_entropy, supervised_slots
from tasks.drafter.model import DFlashDrafter

log = logging.getLogger("tasks")
Evaluate = Callable[[DFlashDrafter], dict[str, float]]  # must hold `replay_acceptance_length`
LogMetrics = Callable[[dict[str, float], int], None]


@dataclass
class Training:
    """One training: what it works on and where it reports.

    Attributes:
        spec: resolved.
        drafter: float32 parameters, on `device`.
        embedding: [V, H] of the target, on `device`.
        head: [V, H], on `device`.
        shards: of the training split.
        read: a sample with its states.
        evaluate: figures of the drafter as it is; the best by `replay_acceptance_length` is kept.
        log_metrics: takes metrics and the step.
        checkpoints: None: none are written.
        on_step: called with the metrics of each step, for progress.
    """

    spec: RunSpec
    drafter: DFlashDrafter
    embedding: Tensor
    head: Tensor
    shards: Sequence[ShardIndex]
    read: Callable[[SampleAddress], Any]
    evaluate: Evaluate
    log_metrics: LogMetrics
    checkpoints: Checkpoints | None = None
    on_step: Callable[[dict[str, float]], None] = lambda metrics: None
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.state = TrainingState(0, {}, {}, {}, {}, best_step=0, best_acceptance=-1.0)
        self._names = {id(p): name for name, p in self.drafter.named_parameters()}
        self._optimizer = torch.optim.AdamW(
            self.drafter.parameters(), lr=self.spec.learning_rate, weight_decay=self.spec.weight_decay,
            betas=(0.9, 0.999), fused=self.device == "cuda",
        )  # fmt: skip
        self._plans = [self._epoch_plan(epoch) for epoch in range(self.spec.epochs)]
        self.total_steps = sum(len(plan) for plan in self._plans)
        if self.spec.max_steps is not None:
            self.total_steps = min(self.total_steps, self.spec.max_steps)
        if not self.total_steps:
            raise DataError("there is no training sample: every sample is in the validation split or has no answer")

    def _epoch_plan(self, epoch: int) -> list[list[SampleAddress]]:
        return epoch_steps(self.shards, self.spec.seed, epoch, self.spec.batch_tokens)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> TrainingState:
        """Train to the end, from the newest whole checkpoint where there is one.

        Raises:
            TrainingDiverged: naming step and samples.
            Interrupted: after a checkpoint was written.
        """
        self._resume()
        steps = prefetch(self._rows())
        try:
            while self.state.step < self.total_steps:
                waiting = time.perf_counter()
                rows = next(steps)
                started = time.perf_counter()
                metrics = self._step(rows)
                ended = time.perf_counter()
                self._account(rows, metrics, ended - started, started - waiting)
        except Interrupted:
            self._save()
            raise
        finally:
            steps.close()
        return self.state

    def _rows(self) -> Iterator[list[Row]]:
        step = 0
        for epoch, plan in enumerate(self._plans):
            for addresses in plan:
                step += 1
                if step > self.total_steps:
                    return
                if step > self.state.step:
                    samples = [self.read(address) for address in addresses]
                    yield make_rows(samples, anchors=self.spec.anchors, seed=self.spec.seed, epoch=epoch)

    def _step(self, rows: list[Row]) -> dict[str, float]:
        """One optimizer step; the position moves only when it is whole."""
        step = self.state.step + 1
        rate = learning_rate(step, self.total_steps, self.spec.learning_rate, self.spec.warmup_share)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        rows = [row.to(self.device) for row in rows]
        slots = [self._slots(row) for row in rows]
        total = sum(float(s.weight.sum()) for s in slots)
        loss, correct, counted = 0.0, torch.zeros(self.spec.block_size), torch.zeros(self.spec.block_size)
        for row, chosen in zip(rows, slots, strict=True):
            if len(chosen.label):
                part, right = self._row_loss(row, chosen)
                (part / total).backward()
                loss += float(part.detach()) / total
                correct += torch.bincount(chosen.slot[right].cpu(), minlength=self.spec.block_size)
                counted += torch.bincount(chosen.slot.cpu(), minlength=self.spec.block_size)
        norm = float(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.spec.grad_clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            names = [name for row in rows for name in row.sample_ids]
            raise TrainingDiverged(
                f"step {step}: loss {loss}, gradient norm {norm}; expected finite numbers. Samples of this step: {names}. "
                f"Lower learning_rate (now {self.spec.learning_rate}) or grad_clip, or look at these samples"
            )
        if total:
            self._optimizer.step()
        self.state.step = step
        accuracy = {
            f"train/accuracy_position_{k}": float(correct[k] / counted[k])
            for k in range(1, self.spec.block_size) if counted[k]
        }  # fmt: skip
        return {"train/loss": loss, "train/learning_rate": rate, "train/grad_norm": norm, **accuracy}

    def _slots(self, row: Row) -> Slots:
        gamma = self.spec.loss_decay or self.spec.block_size / 2
        return supervised_slots(row.input_ids, row.loss_mask, row.anchors[0], self.spec.block_size, gamma, row.ends)

    def _row_loss(self, row: Row, slots: Slots) -> tuple[Tensor, Tensor]:
        """Loss sum of one row, and which slots are right."""
        blocks = torch.full((len(row.anchors[0]), self.spec.block_size), self.drafter.config.mask_token_id)
        blocks = blocks.to(self.device)
        blocks[:, 0] = row.input_ids[row.anchors[0]]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            embeddings = functional.embedding(blocks, self.embedding).to(self.drafter.fc.weight.dtype)
            hidden = self.drafter.block_hidden(
                row.states, embeddings[None], row.anchors, positions=row.positions, documents=row.documents
            )[0]
        chosen = hidden[slots.block, slots.slot].to(self.head.dtype)
        return head_cross_entropy(chosen, self.head, slots.label, slots.weight)

    def _account(self, rows: list[Row], metrics: dict[str, float], busy: float, waited: float) -> None:
        step, spec = self.state.step, self.spec
        tokens = sum(len(row.input_ids) for row in rows)
        anchors = sum(row.anchors.shape[1] for row in rows)
        metrics |= {
            "train/tokens_per_second": tokens / (busy + waited),
            "train/anchors_per_second": anchors / (busy + waited),
            "train/data_wait_share": waited / (busy + waited),
        }
        if self.device == "cuda":
            metrics["train/gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if step % spec.evaluate_steps == 0 or step == self.total_steps:
            metrics |= self._evaluate()
        self.log_metrics(metrics, step)
        self.state.history.append({"step": step, "metrics": metrics})
        self.on_step(metrics)
        if step % spec.checkpoint_steps == 0 and step < self.total_steps:
            self._save()

    def _evaluate(self) -> dict[str, float]:
        self.drafter.eval()
        figures = self.evaluate(self.drafter)
        self.drafter.train()
        acceptance = figures["replay_acceptance_length"]
        if acceptance > self.state.best_acceptance:
            self.state.best_acceptance, self.state.best_step = acceptance, self.state.step
            self.state.best_weights = self._copy_of_weights()
        log.info(
            "step %d: %s", self.state.step, ", ".join(f"{n.replace('_', ' ')} {v:.4f}" for n, v in figures.items())
        )
        return {f"train/{name}": value for name, value in figures.items()}

    # ---- state ------------------------------------------------------------------------------------------------------

    def _copy_of_weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.drafter.state_dict().items()}

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        self.state.weights = self.drafter.state_dict()
        self.state.first_moments, self.state.second_moments = moments(self._optimizer, self._names)
        self.checkpoints.save(self.state)

    def _resume(self) -> None:
        found = self.checkpoints.load() if self.checkpoints else None
        if found is None:
            self.drafter.train()
            return
        self.state = found
        self.drafter.load_state_dict(found.weights)
        for name, parameter in self.drafter.named_parameters():
            if name in found.first_moments:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(found.step), device=self.device if self.device == "cuda" else "cpu"),
                    "exp_avg": found.first_moments[name].to(parameter.device),
                    "exp_avg_sq": found.second_moments[name].to(parameter.device),
                }
        self.drafter.train()
        log.info("resumed at step %d of %d", found.step, self.total_steps)


def learning_rate(step: int, total: int, peak: float, warmup_share: float) -> float:
    """Linear warm-up, then half a cosine to zero. `step` counts from 1."""
    warmup = max(1, round(total * warmup_share))
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
