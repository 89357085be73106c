"""The training loop: AdamW, warm-up and cosine, clipped gradients, evaluation by replay, checkpoints.

Parameters, gradients and moments are float32. On a GPU the forward pass runs under bfloat16 autocast (float32 where the
target's head is float32). Everything random is a function of (seed, epoch, sample) and the learning rate one of the
step, so a checkpoint needs no generator, schedule or data position: a resumed training on a CPU is bit-identical.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tasks.contract.errors import DataError, Interrupted, TrainingDiverged
from tasks.contract.spec import RunSpec
from tasks.drafter.batches import ReadSample, Row, ShardIndex, epoch_steps, make_rows, prefetch
from tasks.drafter.checkpoint import Checkpoints, TrainingState
from tasks.drafter.interruption import deferred_sigterm
from tasks.drafter.model import DFlashDrafter
from tasks.drafter.objective import Objective, Outcome

log = logging.getLogger("tasks")
_LOGGED_STEPS = 2000  # of a training at most; the history is in every checkpoint


@dataclass(frozen=True)
class Evaluation:
    """What was found of the drafter after some step."""

    metrics: dict[str, float]  # by the names under which they are logged
    acceptance_length: float | None  # by replay; None if no reference text had a verification step
    validation_loss: float | None


Evaluate = Callable[[DFlashDrafter, Objective], Evaluation]


@dataclass
class Training:
    """One training: what it works on and where it reports.

    Attributes:
        spec: resolved.
        drafter: float32 parameters, on `device`.
        objective: loss over rows, with the target's embedding and head on `device`.
        shards: of the training split.
        read: a sample with its states.
        evaluate: the drafter with the longest replayed acceptance is kept (equal ones: with the lowest loss).
        log_metrics: takes metrics and the step.
        checkpoints: None: none are written.
        on_step: called with the metrics of each step, for progress.
        device: cpu or cuda.
    """

    spec: RunSpec
    drafter: DFlashDrafter
    objective: Objective
    shards: Sequence[ShardIndex]
    read: ReadSample
    evaluate: Evaluate
    log_metrics: Callable[[dict[str, float], int], None]
    checkpoints: Checkpoints | None = None
    on_step: Callable[[dict[str, float]], None] = lambda metrics: None
    device: str = "cpu"
    state: TrainingState = field(default_factory=TrainingState)

    def __post_init__(self) -> None:
        spec = self.spec
        matrices = [p for p in self.drafter.parameters() if p.ndim > 1]
        vectors = [p for p in self.drafter.parameters() if p.ndim == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=spec.learning_rate,
            betas=(0.9, 0.999),
            fused=self.device == "cuda",
        )
        self._epoch_lengths = self._count_steps()
        self.total_steps = sum(self._epoch_lengths)
        if not self.total_steps:
            raise DataError(
                "found no training sample with two supervised tokens in a row; expected at least one: every sample is "
                "in the validation split or has no answer"
            )
        self.log_interval = max(1, self.total_steps // _LOGGED_STEPS)
        self._saved_step = 0

    def _count_steps(self) -> list[int]:
        """Steps of each epoch, up to `max_steps` in all."""
        lengths: list[int] = []
        left = self.spec.max_steps
        for epoch in range(self.spec.epochs):
            count = len(epoch_steps(self.shards, self.spec.seed, epoch, self.spec.batch_tokens))
            if left is not None:
                count = min(count, left)
                left -= count
            lengths.append(count)
            if left == 0:
                break
        return lengths

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> TrainingState:
        """Train to the end, from the newest whole checkpoint where there is one.

        Raises:
            TrainingDiverged: naming step and samples.
            Interrupted: by SIGTERM, after a checkpoint was written.
            Superseded: if another attempt at the same training has taken over.
        """
        self._resume()
        steps = prefetch(self._steps())
        try:
            while True:
                self._evaluate_if_due()
                self._save_if_due()
                if self.state.step >= self.total_steps:
                    return self.state
                waiting = time.perf_counter()
                rows = next(steps)
                self._step(rows, waited=time.perf_counter() - waiting)
        except Interrupted:
            self._save()
            raise
        finally:
            steps.close()  # type: ignore[attr-defined]

    def _steps(self) -> Iterator[list[Row]]:
        """Rows of each step from the state's on."""
        done = self.state.step
        for epoch, length in enumerate(self._epoch_lengths):
            if done >= length:
                done -= length
                continue
            plan = epoch_steps(self.shards, self.spec.seed, epoch, self.spec.batch_tokens)
            for addresses in plan[done:length]:
                rows = make_rows(
                    map(self.read, addresses), anchors=self.spec.anchors, block_size=self.spec.block_size,
                    seed=self.spec.seed, epoch=epoch,
                )  # fmt: skip
                yield [row.pinned() for row in rows] if self.device == "cuda" else list(rows)
            done = 0

    def _step(self, rows: list[Row], waited: float) -> None:
        """One optimizer step. Until it is whole the state is as before."""
        started = time.perf_counter()
        step = self.state.step + 1
        rate = learning_rate(step, self.total_steps, self.spec.learning_rate, self.spec.warmup_share)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        rows = [row.to(self.device) for row in rows]
        outcome = self.objective.accumulate(self.drafter, rows)
        norm = float(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.spec.grad_clip))
        if not (math.isfinite(outcome.loss) and math.isfinite(norm)):
            raise self._diverged(step, rows, outcome, norm)
        with deferred_sigterm():
            self._optimizer.step()
            self.state.step = step
            seconds = time.perf_counter() - started
            metrics = {
                "train/loss": outcome.loss,
                "train/learning_rate": rate,
                "train/grad_norm": norm,
                "train/epoch": float(self._epoch(step)),
                **self._speed(rows, seconds, waited),
                **outcome.accuracies("train/accuracy_position"),
            }
            if step % self.log_interval == 0 or step == self.total_steps:
                self._record(metrics)
            self.on_step(metrics)

    def _speed(self, rows: list[Row], seconds: float, waited: float) -> dict[str, float]:
        total = seconds + waited
        speed = {
            "train/tokens_per_second": sum(len(row.input_ids) for row in rows) / total,
            "train/anchors_per_second": sum(row.anchors.shape[1] for row in rows) / total,
            "train/data_wait_share": waited / total,
            "train/step_seconds": total,
        }
        if self.device == "cuda":
            speed["train/gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return speed

    def _epoch(self, step: int) -> int:
        """Number of the epoch, from 0, to which a step belongs."""
        for epoch, length in enumerate(self._epoch_lengths):
            if step <= length:
                return epoch
            step -= length
        return len(self._epoch_lengths) - 1

    def _diverged(self, step: int, rows: list[Row], outcome: Outcome, norm: float) -> TrainingDiverged:
        suspects = [name for row in rows for name in self.objective.samples_not_finite(self.drafter, row)]
        everything = [name for row in rows for name in row.sample_ids]
        samples = (
            f"samples whose states or loss are not finite: {suspects}"
            if suspects
            else f"every sample's loss is finite by itself; samples of this step: {everything}"
        )
        return TrainingDiverged(
            f"step {step}: found loss {outcome.loss}, gradient norm {norm}; expected finite numbers; {samples}. Look "
            f"at these samples, or lower learning_rate (now {self.spec.learning_rate}) or grad_clip"
        )

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        step = self.state.step
        due = step == self.total_steps or (step and step % self.spec.evaluate_steps == 0)
        if not due or self.state.evaluated_step == step:
            return
        self.drafter.eval()
        found = self.evaluate(self.drafter, self.objective)
        self.drafter.train()
        best = (self.state.best_acceptance, -_or_infinity(self.state.best_validation_loss))
        new = (found.acceptance_length or 1.0, -_or_infinity(found.validation_loss))
        with deferred_sigterm():
            if not self.state.best_step or new > best:
                self.state.best_acceptance, self.state.best_step = new[0], step
                self.state.best_validation_loss = found.validation_loss
                self.state.best_weights = {
                    name: tensor.detach().to("cpu", copy=True) for name, tensor in self.drafter.state_dict().items()
                }
            self.state.evaluated_step = step
            self._record(found.metrics)
        log.info("step %d: %s", step, ", ".join(f"{n.partition('/')[2]} {v:.4f}" for n, v in found.metrics.items()))

    def _record(self, metrics: dict[str, float]) -> None:
        """To the history, one line a step, and to the tracker."""
        step, history = self.state.step, self.state.history
        if history and history[-1]["step"] == step:
            history[-1]["metrics"] |= metrics
        else:
            history.append({"step": step, "metrics": dict(metrics)})
        self.log_metrics(metrics, step)

    # ---- state ------------------------------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        step = self.state.step
        if step == self.total_steps or step % self.spec.checkpoint_steps == 0:
            self._save()

    def _save(self) -> None:
        if self.checkpoints is None or self.state.step == self._saved_step:
            return
        self.state.weights = self.drafter.state_dict()
        for name, parameter in self.drafter.named_parameters():
            moments = self._optimizer.state[parameter]
            self.state.first_moments[name] = moments["exp_avg"]
            self.state.second_moments[name] = moments["exp_avg_sq"]
        with deferred_sigterm():
            self.checkpoints.save(self.state)
            self._saved_step = self.state.step
        log.info("checkpoint at step %d of %d", self.state.step, self.total_steps)

    def _resume(self) -> None:
        self.drafter.train()
        found = self.checkpoints.load() if self.checkpoints else None
        if found is None:
            return
        self.state, self._saved_step = found, found.step
        self.drafter.load_state_dict(found.weights)
        for name, parameter in self.drafter.named_parameters():
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(found.step), device=self.device),
                "exp_avg": found.first_moments[name].to(parameter.device),
                "exp_avg_sq": found.second_moments[name].to(parameter.device),
            }
        log.info("resumed at step %d of %d", found.step, self.total_steps)


def learning_rate(step: int, total: int, peak: float, warmup_share: float) -> float:
    """Linear warm-up, then half a cosine to zero. `step` counts from 1."""
    warmup = round(total * warmup_share)
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup + 1)))


def _or_infinity(value: float | None) -> float:
    return math.inf if value is None else value
