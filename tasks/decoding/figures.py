"""Plots of acceptance, for MLflow. Drawn without pyplot: no display, no global state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.decoding.acceptance import AcceptanceCount

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOUR = "#3b6ea5"


def accepted_by_position(count: AcceptanceCount) -> Figure:
    """Share of steps that accepted the draft token at each position of the block."""
    shares = count.share_by_position()
    figure, axes = _figure()
    axes.bar(list(shares), list(shares.values()), color=_COLOUR)
    axes.set(xlabel="Draft position", ylabel="Share of steps that accepted it", ylim=(0, 1), xticks=list(shares))
    axes.set_title(f"Accepted by draft position ({count.steps:,} verification steps)")
    return figure


def accepted_per_step(count: AcceptanceCount) -> Figure:
    """Histogram of accepted draft tokens per verification step."""
    figure, axes = _figure()
    accepted = list(range(count.block_size))
    axes.bar(accepted, [steps / max(count.steps, 1) for steps in count.steps_by_accepted], color=_COLOUR)
    axes.set(xlabel="Accepted draft tokens in a step", ylabel="Share of steps", xticks=accepted)
    axes.set_title(f"Accepted per step (acceptance length {count.acceptance_length:.2f} of {count.block_size})")
    return figure


def acceptance_by_slice(counts: Mapping[str, AcceptanceCount]) -> Figure:
    """Acceptance length of each slice that has a step, with its 95% interval (bootstrap over prompts)."""
    shown = {name: count for name, count in sorted(counts.items()) if count.steps}
    figure, axes = _figure(height=1.6 + 0.45 * len(shown))
    for row, count in enumerate(shown.values()):
        length = count.acceptance_length
        low, high = count.confidence_interval()
        error = [[max(length - low, 0)], [max(high - length, 0)]]
        axes.barh(row, length, xerr=error, color=_COLOUR, ecolor="#222222", capsize=3)
        axes.annotate(
            f"{length:.2f} [{low:.2f}, {high:.2f}]",
            (max(high, length), row),
            (6, 0),
            fontsize=8,
            textcoords="offset points",
            va="center",
        )
    labels = [f"{name} ({len(count.prompts)} prompts)" for name, count in shown.items()]
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.axvline(1, color="#888888", linewidth=0.8)
    block_size = max(count.block_size for count in counts.values())
    axes.set(xlabel="Acceptance length, 95% interval over prompts", xlim=(0, 1.25 * block_size))
    axes.set_title("Acceptance by slice")
    return figure


def _figure(height: float = 4.0) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
