"""The figures of a finished run, and the Markdown report that MLflow shows as the run's description."""

from __future__ import annotations

from typing import Any

from tasks.contract.receipt import Receipt
from tasks.contract.spec import RunSpec


def summary(receipts: dict[str, Receipt], spec: RunSpec) -> dict[str, Any]:
    """What a person asks first, from the receipts of the stages."""
    assemble, check, train = receipts["assemble"], receipts["check"], receipts["train"]
    measure = receipts["measure"]
    return {
        "target": receipts["target"].details["name"],
        "samples_read": assemble.counts["read"],
        "samples_kept": assemble.counts["samples"],
        "samples_rejected": assemble.counts["rejected"],
        "tokens": assemble.counts["tokens"],
        "supervised_tokens": assemble.counts["supervised_tokens"],
        "shards": len(assemble.details["shards"]),
        "layer_ids": spec.layer_ids,
        "check": check.details["verdict"],
        "steps": train.counts["steps"],
        "loss": train.metrics["loss"],
        "prompts": measure.counts["prompts"],
        "block_size": spec.block_size,
        "lossless": measure.details["lossless"],
        "acceptance_length": measure.metrics["acceptance_length"],
        "replay_acceptance_length": measure.metrics["replay_acceptance_length"],
        "tokens_per_second_plain": measure.metrics["tokens_per_second_plain"],
        "tokens_per_second_drafter": measure.metrics["tokens_per_second_drafter"],
        "slices": measure.details["slices"],
    }


def run_report(facts: dict[str, Any]) -> str:
    """Markdown for the MLflow run's description."""
    speed = facts["tokens_per_second_drafter"] / facts["tokens_per_second_plain"]
    rows = [
        ("Acceptance length (real decoding)", f"**{facts['acceptance_length']:.3f}** of {facts['block_size']}"),
        ("Acceptance length (replay)", f"{facts['replay_acceptance_length']:.3f}"),
        ("Output equals plain greedy decoding", "yes" if facts["lossless"] else "**no**"),
        (
            "Tokens/s with and without drafter",
            f"{facts['tokens_per_second_drafter']:.1f} and {facts['tokens_per_second_plain']:.1f} ({speed:.2f}x)",
        ),
        ("Training", f"{facts['steps']:,} steps, last loss {facts['loss']:.3f}"),
        (
            "Data",
            f"{facts['samples_read']:,} rows read, {facts['samples_kept']:,} samples kept, "
            f"{facts['samples_rejected']:,} rows rejected; {facts['tokens']:,} tokens",
        ),
        ("Hidden states", f"{facts['shards']} shards, layers {facts['layer_ids']}, check: {facts['check']}"),
        ("Gate", facts["gate"]),
        ("Weights", f"`{facts['drafter']}`"),
    ]
    lines = [f"### Drafter for {facts['target']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    lines += ["", "| slice | acceptance length | prompts |", "|---|---:|---:|"]
    lines += [
        f"| {name} | {values['acceptance_length']:.3f} | {values['prompts']} |"
        for name, values in sorted(facts["slices"].items())
    ]
    return "\n".join(lines) + "\n"
