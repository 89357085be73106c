"""What became of the data, for people: counts by reason with examples, lengths, and a page to read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.data.rejection import RejectReason

EXAMPLES_PER_REASON = 5


@dataclass
class RejectCounts:
    """Rejections by reason, with the first few of each as examples."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, reason: RejectReason | str, example: dict[str, Any] | None = None, count: int = 1) -> None:
        """Count, and keep the example if the reason has fewer than `EXAMPLES_PER_REASON`."""
        self.counts[str(reason)] += count
        kept = sum(e["reason"] == str(reason) for e in self.examples)
        if example is not None and kept < EXAMPLES_PER_REASON:
            self.examples.append({**example, "reason": str(reason)})

    def in_words(self) -> str:
        """`too_short 3, no_answer 2`, most frequent first."""
        return ", ".join(f"{reason} {count:,}" for reason, count in self.counts.most_common()) or "none"


class LengthHistogram:
    """Samples by length: bins of doubling width, (2^(k-1), 2^k] tokens."""

    def __init__(self, bins: dict[int, int] | None = None) -> None:
        self.bins: Counter[int] = Counter(bins or {})

    def add(self, tokens: int, count: int = 1) -> None:
        """Count samples of so many tokens."""
        self.bins[1 << max(tokens - 1, 0).bit_length()] += count

    def to_json(self) -> dict[str, int]:
        """Upper bound of each bin to its samples, in order."""
        return {str(bound): self.bins[bound] for bound in sorted(self.bins)}


def data_page(title: str, facts: dict[str, Any], tables: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown page: a list of facts, then tables (rows as dictionaries with equal keys)."""
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {_cell(value)}" for name, value in facts.items()]
    for name, rows in tables.items():
        if not rows:
            continue
        columns = list(rows[0])
        numeric = [isinstance(rows[0][c], (int, float)) for c in columns]
        lines += ["", f"## {name}", "", _row(columns), _row(["---:" if n else "---" for n in numeric])]
        lines += [_row([_cell(row.get(column, "")) for column in columns]) for row in rows]
    return "\n".join(lines) + "\n"


def plot_lengths(path: Path, histograms: dict[str, LengthHistogram]) -> None:
    """PNG with the length distribution of each split."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bounds = sorted({bound for histogram in histograms.values() for bound in histogram.bins})
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    width = 0.8 / max(len(histograms), 1)
    for index, (name, histogram) in enumerate(histograms.items()):
        places = [i + index * width for i in range(len(bounds))]
        bars = axes.bar(places, [histogram.bins[b] for b in bounds], width, label=name, align="edge")
        axes.bar_label(bars, fontsize=8)
    axes.set_xticks([i + 0.4 for i in range(len(bounds))], [f"≤ {bound:,}" for bound in bounds])
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("samples")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return " ".join(str(value).split()).replace("|", "\\|")
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
