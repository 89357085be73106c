"""Plots of a training, for MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

History = Sequence[dict[str, Any]]
_SMOOTHING = 0.1


def loss_figure(history: History) -> Figure:
    """Loss over optimizer steps with its running mean, and on validation samples."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    points = _series(history, "train/loss")
    _plot(axes, points, "step", alpha=0.35)
    mean, means = points[0][1] if points else 0.0, []
    for step, loss in points:
        mean += _SMOOTHING * (loss - mean)
        means.append((step, mean))
    _plot(axes, means, "running mean")
    _plot(axes, _series(history, "train/validation_loss"), "validation", marker="o")
    axes.set(xlabel="Optimizer step", ylabel="Weighted cross-entropy (nats)", title="Loss")
    axes.legend()
    return figure


def acceptance_figure(history: History) -> Figure:
    """Replayed acceptance on the reference texts, overall and by draft position, over optimizer steps."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    _plot(top, _series(history, "train/replay_acceptance_length"), "replay", marker="o")
    top.set(ylabel="Tokens a step", title="Acceptance length by replay")
    _plot_positions(bottom, history, "train/replay_share_position_")
    bottom.set(xlabel="Optimizer step", ylabel="Share of steps", title="Accepted at each draft position, by replay")
    return figure


def accuracy_figure(history: History) -> Figure:
    """Share of slots right at each draft position, in training, over optimizer steps."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    _plot_positions(axes, history, "train/accuracy_position_")
    axes.set(xlabel="Optimizer step", ylabel="Share right", title="Training accuracy by draft position")
    return figure


def _plot_positions(axes: Axes, history: History, prefix: str) -> None:
    for name in sorted({name for line in history for name in line["metrics"] if name.startswith(prefix)}):
        _plot(axes, _series(history, name), str(int(name.removeprefix(prefix))), linewidth=1)
    if axes.lines:
        axes.legend(title="Draft position", ncol=4, fontsize="small")


def _series(history: History, name: str) -> list[tuple[int, float]]:
    return [(line["step"], line["metrics"][name]) for line in history if name in line["metrics"]]


def _plot(axes: Axes, points: Sequence[tuple[int, float]], label: str, **style: Any) -> None:
    axes.grid(alpha=0.3)
    if points:
        axes.plot([step for step, _ in points], [value for _, value in points], label=label, **style)
