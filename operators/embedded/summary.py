"""The figures of a finished run, taken from the receipts in the store, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from operators.embedded.errors import RunFailed
from tasks.contract.receipt import Receipt

STAGES = ("assemble", "check", "train", "measure", "register")


def figures(receipts: Mapping[str, Receipt]) -> list[tuple[str, str]]:
    """Rows of the final table: what, and how much.

    Raises:
        RunFailed: naming every figure that a receipt lacks.
    """
    reader = _Reader(receipts)
    steps = reader.number("train", "counts", "steps")
    rows = [
        ("Samples read", _count(reader.number("assemble", "counts", "read"))),
        ("Samples kept", _count(reader.number("assemble", "counts", "kept"))),
        ("Samples rejected", _rejected(reader)),
        ("Tokens kept", _count(reader.number("assemble", "counts", "tokens"))),
        ("Tokens supervised", _count(reader.number("assemble", "counts", "supervised_tokens"))),
        ("Shards", _count(len(reader.value("check", "details", "shards") or []))),
        ("Integrity check", str(reader.value("check", "details", "verdict"))),
        ("Training steps", _count(steps)),
        ("Training loss", f"{reader.number('train', 'metrics', 'loss'):.3f}"),
        ("Acceptance length, real decoding", f"{reader.number('measure', 'metrics', 'acceptance_length'):.3f}"),
        ("Acceptance length, replay", f"{reader.number('measure', 'metrics', 'replay_acceptance_length'):.3f}"),
        *_speed(reader),
    ]
    reader.complain()
    return rows


def mlflow_run_url(receipts: Mapping[str, Receipt]) -> str:
    """Address of the MLflow run.

    Raises:
        RunFailed: if `register` did not say.
    """
    summary = receipts["register"].details.get("summary", {})
    url = summary.get("mlflow_run_url")
    if not url:
        raise RunFailed(f"receipt of register: details.summary.mlflow_run_url is missing; it has {sorted(summary)}")
    return str(url)


def _speed(reader: _Reader) -> list[tuple[str, str]]:
    drafted = reader.number("measure", "metrics", "tokens_per_second_drafter")
    plain = reader.number("measure", "metrics", "tokens_per_second_plain")
    ratio = f" ({drafted / plain:.2f} of plain)" if plain else ""
    return [
        ("Tokens/s with drafter", f"{drafted:.1f}{ratio}"),
        ("Tokens/s without", f"{plain:.1f}"),
    ]


def _rejected(reader: _Reader) -> str:
    count = _count(reader.number("assemble", "counts", "rejected"))
    reasons = reader.optional("assemble", "details", "rejected") or {}
    listed = ", ".join(f"{reason}: {number:,}" for reason, number in sorted(reasons.items()) if number)
    return f"{count} ({listed})" if listed else count


def _count(number: float) -> str:
    return f"{int(number):,}"


class _Reader:
    """Takes values from receipts and remembers which were not there, to name them all at once."""

    def __init__(self, receipts: Mapping[str, Receipt]) -> None:
        self._receipts = receipts
        self._missing: list[str] = []

    def optional(self, stage: str, part: str, name: str) -> Any:
        receipt = self._receipts.get(stage)
        return None if receipt is None else getattr(receipt, part).get(name)

    def value(self, stage: str, part: str, name: str) -> Any:
        found = self.optional(stage, part, name)
        if found is None:
            self._missing.append(f"receipt of {stage}: {part}.{name}")
        return found

    def number(self, stage: str, part: str, name: str) -> float:
        found = self.value(stage, part, name)
        return 0.0 if found is None else float(found)

    def complain(self) -> None:
        if self._missing:
            raise RunFailed("the run succeeded, but these figures are missing:\n  " + "\n  ".join(self._missing))
