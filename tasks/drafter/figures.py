"""Plots of a training, for MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure


def loss_figure(history: Sequence[dict[str, Any]]) -> Figure:
    """Loss over optimizer steps, with its running mean."""
    steps = [line["step"] for line in history]
    losses = [line["metrics"]["train/loss"] for line in history]
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(steps, losses, alpha=0.35, label="step")
    mean, means = losses[0], []
    for loss in losses:
        mean += 0.1 * (loss - mean)
        means.append(mean)
    axes.plot(steps, means, label="running mean")
    axes.set(xlabel="optimizer step", ylabel="weighted cross-entropy (nats)", title="Training loss")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def acceptance_figure(history: Sequence[dict[str, Any]]) -> Figure:
    """Replayed acceptance on the reference texts, and accuracy by draft position, over optimizer steps."""
    figure = Figure(figsize=(7, 6))
    top, bottom = figure.subplots(2, 1, sharex=True)
    name = "train/replay_acceptance_length"
    points = [(line["step"], line["metrics"][name]) for line in history if name in line["metrics"]]
    top.plot(*zip(*points, strict=True), marker="o")
    top.set(ylabel="tokens a step", title="Acceptance length by replay")
    top.grid(alpha=0.3)
    prefix = "train/accuracy_position_"
    positions = sorted({int(k.removeprefix(prefix)) for line in history for k in line["metrics"] if k.startswith(prefix)})
    for position in positions:
        key = f"{prefix}{position}"
        series = [(line["step"], line["metrics"][key]) for line in history if key in line["metrics"]]
        bottom.plot(*zip(*series, strict=True), label=str(position), linewidth=1)
    bottom.set(xlabel="optimizer step", ylabel="share right", title="Training accuracy by draft position")
    bottom.legend(title="position", ncol=4, fontsize="small")
    bottom.grid(alpha=0.3)
    return figure
