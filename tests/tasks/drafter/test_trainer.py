from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.contract.errors import DataError, Interrupted, TrainingDiverged
from tasks.drafter.checkpoint import Checkpoints, Superseded, TrainingState
from tasks.drafter.interruption import deferred_sigterm
from tasks.drafter.trainer import Training, learning_rate
from tasks.storage.folder import FolderStore
from tests.tasks.drafter.cases import FallingLoss, Shards, sample, shards, training

UNTIMED = ("train/loss", "train/learning_rate", "train/grad_norm", "train/epoch", "train/replay_acceptance_length")


class Killed(BaseException):
    """What no handler catches, like SIGKILL."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same(a: TrainingState, b: TrainingState) -> None:
    assert (a.step, a.best_step, a.best_acceptance) == (b.step, b.best_step, b.best_acceptance)
    for name, tensor in a.best_weights.items():
        assert torch.equal(tensor, b.best_weights[name]), name
    assert history(a) == history(b)


def history(state: TrainingState) -> list[tuple[int, dict[str, float]]]:
    return [
        (line["step"], {n: v for n, v in line["metrics"].items() if n in UNTIMED or "position" in n})
        for line in state.history
    ]


def final_weights(run: Training) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.drafter.state_dict().items()}


def test_learning_rate() -> None:
    rates = [learning_rate(step, 100, 6e-4, 0.04) for step in range(1, 101)]
    assert rates[:4] == pytest.approx([1.5e-4, 3e-4, 4.5e-4, 6e-4])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[51] == pytest.approx(3e-4, rel=0.05)
    assert 0 < rates[-1] < 1e-6
    assert learning_rate(1, 1, 1.0, 0.04) > 0


def test_history_has_a_line_a_step_with_its_evaluation() -> None:
    run = training(shards())
    state = run.run()
    assert state.step == run.total_steps > 8
    assert [line["step"] for line in state.history] == list(range(1, run.total_steps + 1))
    evaluated = [line["step"] for line in state.history if "train/validation_loss" in line["metrics"]]
    assert evaluated == sorted({*range(3, run.total_steps, 3), run.total_steps})
    first = state.history[0]["metrics"]
    assert set(first) >= {
        *UNTIMED[:4], "train/accuracy_position_01", "train/accuracy_position_03", "train/tokens_per_second",
        "train/anchors_per_second", "train/data_wait_share",
    }  # fmt: skip
    assert "train/accuracy_position_00" not in first
    assert [line["metrics"]["train/epoch"] for line in state.history][-1] == 2
    assert math.isclose(first["train/loss"], math.log(50), rel_tol=0.5)


def test_a_long_history_is_thinned() -> None:
    run = training(shards())
    run.log_interval = 4
    steps = [line["step"] for line in run.run().history]
    assert steps == sorted({*range(4, run.total_steps, 4), *range(3, run.total_steps, 3), run.total_steps})


def test_the_best_acceptance_is_kept_and_equal_ones_go_to_the_lowest_loss() -> None:
    state = training(shards(), evaluate=FallingLoss({3: 1.2, 6: 1.9, 9: 1.3})).run()
    assert (state.best_step, state.best_acceptance) == (6, 1.9)
    run = training(shards())  # acceptance 1.0 throughout, loss falls
    assert run.run().best_step == run.total_steps
    for name, tensor in run.state.best_weights.items():
        assert torch.equal(tensor, run.drafter.state_dict()[name])


def test_max_steps_ends_the_training() -> None:
    state = training(shards(), max_steps=2).run()
    assert (state.step, state.best_step, len(state.history)) == (2, 2, 2)


def test_rows_are_accumulated_into_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in many rows is the step in one row: the loss is normed over all of it."""
    from tasks.drafter import batches

    runs = []
    for slots in (10_000, 1):
        monkeypatch.setattr(batches.make_rows, "__kwdefaults__", {"row_tokens": 4096, "row_slots": slots})
        run = training(shards(), max_steps=3)
        runs.append((history(run.run()), final_weights(run)))
    (one, weights), (many, others) = runs
    for (_, a), (_, b) in zip(one, many, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-5)
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_training_killed_again_and_again_is_the_undisturbed_one(tmp_path: Path, seed: int) -> None:
    """SIGKILL at random moments, newest checkpoint truncated twice: equal bits, no gap, no doubled point."""
    data, acceptance = shards(), {3: 1.2, 6: 1.9, 9: 1.3}
    calm = training(data, evaluate=FallingLoss(acceptance))
    expected = calm.run()
    store, chance = FolderStore(tmp_path / "store"), random.Random(seed)
    truncated = kills = 0
    for attempt in range(40):
        budget = chance.randrange(1, 5)
        run = training(data, Checkpoints(store, "key", f"a{attempt}"), FallingLoss(acceptance))
        calls = 0

        def step(metrics: dict[str, float], budget: int = budget) -> None:
            nonlocal calls
            calls += 1
            if calls == budget:
                raise Killed

        run.on_step = step
        try:
            state = run.run()
            break
        except Killed:
            kills += 1
        newest = sorted(Path(store.root).glob("train/key/*/checkpoint-*"), key=lambda p: p.name)
        if truncated < 2 and len(newest) > 1:
            truncated += 1
            file = newest[-1] / "weights.safetensors"
            file.write_bytes(file.read_bytes()[:-100])
    assert kills >= 3
    assert truncated == 2
    same(state, expected)
    for name, tensor in final_weights(calm).items():
        assert torch.equal(tensor, run.drafter.state_dict()[name]), name


@pytest.mark.parametrize("where", ["read", "evaluate", "log"])
def test_sigterm_writes_a_checkpoint_and_the_next_attempt_goes_on(tmp_path: Path, where: str) -> None:
    data, store = shards(), FolderStore(tmp_path / "store")
    expected = training(data).run()

    def handler(number: int, frame: object) -> None:
        raise Interrupted("stopped by SIGTERM")

    run = training(data, Checkpoints(store, "key", "a1"), checkpoint_steps=1000)
    if where == "read":
        original = run.objective.accumulate
        calls = []

        def accumulate(*args: Any) -> Any:
            calls.append(1)
            found = original(*args)
            if len(calls) == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return found

        run.objective = _With(run.objective, accumulate)  # type: ignore[assignment]
    elif where == "evaluate":
        evaluate = run.evaluate

        def interrupted(*args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(*args)

        run.evaluate = interrupted
    else:
        run.log_metrics = lambda metrics, step: os.kill(os.getpid(), signal.SIGTERM) if step == 5 else None
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(Interrupted):
            run.run()
    finally:
        signal.signal(signal.SIGTERM, previous)
    stopped = {"read": 5, "evaluate": 3, "log": 5}[where]
    later = Checkpoints(store, "key", "a2")
    saved = later.load()
    assert saved is not None
    assert saved.step == stopped
    assert [line["step"] for line in saved.history] == list(range(1, stopped + 1))
    same(training(data, later, checkpoint_steps=1000).run(), expected)


class _With:
    """An objective with another `accumulate`."""

    def __init__(self, objective: Any, accumulate: Any) -> None:
        self._objective, self.accumulate = objective, accumulate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)


def test_a_signal_waits_for_the_end_of_the_block() -> None:
    def handler(number: int, frame: object) -> None:
        raise Interrupted("now")

    done = []

    def interrupted_block() -> None:
        with deferred_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("whole")

    previous = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(Interrupted):
            interrupted_block()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert done == ["whole"]


def test_an_attempt_that_was_taken_over_ends(tmp_path: Path) -> None:
    store, data = FolderStore(tmp_path / "store"), shards()
    old = training(data, Checkpoints(store, "key", "a1"))
    Checkpoints(store, "key", "a2")
    with pytest.raises(Superseded):
        old.run()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_divergence_names_step_and_sample(value: float) -> None:
    """EXT-02, should a NaN get as far as this."""
    data = shards(6)
    bad = data.samples[1][1]
    bad.hidden_states[3, 1, 5] = value
    with pytest.raises(TrainingDiverged) as error:
        training(data, batch_tokens=1000).run()
    assert str(error.value).startswith("step 1: found loss nan")
    assert f"not finite: ['{bad.sample.sample_id.hex()}']" in str(error.value)


def test_an_exploding_training_names_its_samples() -> None:
    data = shards(2)
    run = training(data, batch_tokens=1000)
    with torch.no_grad():
        run.drafter.norm.weight.fill_(3e38)
    with pytest.raises(TrainingDiverged, match="step 1") as error:
        run.run()
    for shard in data.samples:
        assert shard[0].sample.sample_id.hex() in str(error.value)


def test_samples_without_an_anchor_are_skipped_and_none_at_all_is_an_error() -> None:
    """TRN-06: alone in a batch too; no crash, no NaN."""
    useless = sample(9, 50, mask=[0] * 8 + [1])
    tail = sample(9, 51, mask=[0] * 6 + [1] * 3)  # the only supervised tokens are the last block - 1
    run = training(Shards([[useless, tail]]), batch_tokens=64, epochs=1)
    state = run.run()
    assert state.step == 1
    assert math.isfinite(state.history[0]["metrics"]["train/loss"])
    assert "train/accuracy_position_02" in state.history[0]["metrics"]
    with pytest.raises(DataError, match="no training sample with two supervised tokens"):
        training(Shards([[useless]]))


def test_a_drafter_learns_what_can_be_learned() -> None:
    """Cyclic texts, whose states tell position and stride only together with the context."""
    data = Shards([[sample(24, seed=n) for n in range(24)]])
    run = training(data, epochs=60, batch_tokens=200, anchors=8, learning_rate=3e-3, evaluate_steps=1000)
    metrics = run.run().history[-1]["metrics"]
    assert metrics["train/loss"] < 0.5
    assert metrics["train/accuracy_position_01"] > 0.9
    assert metrics["train/accuracy_position_03"] > 0.8
