"""Stage `check`: one verdict over all shards. Training starts from its receipt and from nothing else."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from typing import Any

from tasks.contract.errors import IntegrityError
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.stages.context import StageContext

log = logging.getLogger("tasks")
_SHOWN = 20


def run(ctx: StageContext) -> Receipt:
    """Join the groups: every shard of `assemble` exactly once, each judged by `verify` and `prove` as it is now.

    Returns:
        Details: `shards` in the order of `assemble` (tokens, states, split), `verdict`, statistics and proof by layer;
        object `report.md`. `identity` is the digest over the states' keys.

    Raises:
        IntegrityError: naming the shards that are missing, doubled, or were not judged.
    """
    assemble = ctx.receipt("assemble")
    groups, verified, proved = ctx.receipts("extract"), ctx.receipts("verify"), ctx.receipts("prove")
    entries = [entry for group in groups for entry in group.details["shards"]]
    _refuse(_missing_or_doubled(assemble, entries) + _unjudged(entries, verified, proved))
    by_tokens = {entry["tokens"]["key"]: entry for entry in entries}
    ordered = [by_tokens[shard["ref"]["key"]] for shard in assemble.details["shards"]]
    states = [ctx.load(ReceiptRef(**entry["states"])) for entry in ordered]
    counts = {
        "shards": len(ordered),
        "samples": sum(s.counts["samples"] for s in states),
        "tokens": sum(s.counts["tokens"] for s in states),
        "bytes": sum(o.size for s in states for o in s.objects),
        "proved_samples": sum(p.counts["samples"] for p in proved),
        "faults": 0,
    }
    _refuse(
        [
            f"{counts[name]} {name} in the states, {assemble.counts[name]} in the token shards"
            for name in ("samples", "tokens")
            if counts[name] != assemble.counts[name]
        ]
    )
    layers = _statistics(verified, proved)
    writer = ctx.writer()
    writer.add("report.md", _report(ctx, counts, layers, ordered).encode())
    log.info(
        "check passes: %d shards, %s samples, %s tokens",
        counts["shards"],
        f"{counts['samples']:,}",
        f"{counts['tokens']:,}",
    )
    keys = "\n".join(entry["states"]["key"] for entry in ordered)
    return ctx.publish(
        writer,
        identity=hashlib.sha256(keys.encode()).hexdigest(),
        counts=counts,
        metrics={"max_error": max((p.metrics["max_error"] for p in proved), default=0.0)},
        details={"shards": ordered, "verdict": "pass", "layers": layers, "layer_ids": ctx.spec.layer_ids},
    )


def _missing_or_doubled(assemble: Receipt, entries: list[dict[str, Any]]) -> list[str]:
    expected = {shard["ref"]["key"]: shard for shard in assemble.details["shards"]}
    times = Counter(entry["tokens"]["key"] for entry in entries)
    problems = [f"token shard {key} has no states" for key in expected if key not in times]
    problems += [f"token shard {key} has states {count} times" for key, count in times.items() if count > 1]
    problems += [f"states of token shard {key}, which assemble did not make" for key in times if key not in expected]
    for entry in entries:
        shard = expected.get(entry["tokens"]["key"])
        if shard is not None and shard["ref"]["digest"] != entry["tokens"]["digest"]:
            problems.append(f"token shard {entry['tokens']['key']} is not the one that the states were made from")
        if shard is not None and shard["split"] != entry["split"]:
            problems.append(f"token shard {entry['tokens']['key']}: split {entry['split']}, expected {shard['split']}")
    return problems


def _unjudged(entries: list[dict[str, Any]], verified: list[Receipt], proved: list[Receipt]) -> list[str]:
    problems = []
    for name, receipts in (("verify", verified), ("prove", proved)):
        judged = {digest for receipt in receipts for digest in receipt.details["judged"]}
        problems += [
            f"{name} has not passed a verdict over {receipt.key}"
            for receipt in receipts
            if receipt.details.get("verdict") != "pass"
        ]
        problems += [
            f"states {entry['states']['key']} (token shard {entry['tokens']['key']}) were not judged by {name}"
            for entry in entries
            if entry["states"]["digest"] not in judged
        ]
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        more = f"\nand {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise IntegrityError("check fails; training cannot start:\n" + "\n".join(problems[:_SHOWN]) + more)


def _statistics(verified: list[Receipt], proved: list[Receipt]) -> dict[str, dict[str, float]]:
    """Of each layer, over all groups: range of the samples' row RMS, largest error of the proof, nearest neighbour."""
    layers: dict[str, dict[str, float]] = {}
    for receipt in verified:
        for name, found in receipt.details["layers"].items():
            row = layers.setdefault(name, {"rms_min": found["rms_min"], "rms_max": found["rms_max"]})
            row["rms_min"] = min(row["rms_min"], found["rms_min"])
            row["rms_max"] = max(row["rms_max"], found["rms_max"])
    for receipt in proved:
        for name, error in receipt.details["max_error"].items():
            row = layers.setdefault(name, {})
            row["max_error"] = max(row.get("max_error", 0.0), error)
            distance = receipt.details["min_neighbour_distance"][name]
            row["neighbour_distance"] = min(row.get("neighbour_distance", distance), distance)
    # JSON sorted the names as text; people want 8 before 14, and the last hidden state last.
    return dict(sorted(layers.items(), key=lambda item: (not item[0].isdigit(), item[0].zfill(4))))


def _report(
    ctx: StageContext, counts: dict[str, int], layers: dict[str, dict[str, float]], shards: list[dict[str, Any]]
) -> str:
    spec = ctx.spec
    lines = [
        "# Integrity report: pass",
        "",
        f"Target `{spec.target}`, layers {spec.layer_ids} (layer_output), last hidden state {spec.last_hidden}, "
        f"stored as {spec.states_dtype}.",
        "",
        f"{counts['shards']} shards, {counts['samples']:,} samples, {counts['tokens']:,} tokens, "
        f"{counts['bytes'] / 1e9:.3f} GB: every byte read, every value finite, sample ids, token ids and masks equal "
        f"to the token shards. {counts['proved_samples']} samples extracted again independently.",
        "",
        "| layer | row RMS, least | most | largest error of the proof | distance to the nearer neighbour |",
        "|---|---|---|---|---|",
    ]
    columns = ("rms_min", "rms_max", "max_error", "neighbour_distance")
    for name, row in layers.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[c]:.4g}" if c in row else "" for c in columns) + " |")
    lines += ["", "| token shard | states | split |", "|---|---|---|"]
    lines += [f"| {e['tokens']['key']} | {e['states']['key']} | {e['split']} |" for e in shards]
    return "\n".join(lines) + "\n"
