"""`register`: the drafter's retained copy, the MLflow model version with its lineage, the gate, the run's report.

One registered model per target. A version is found again by the drafter's digest, so registering twice gives one
version. `challenger` always points to the newest; `champion` moves only if the gate passes, after the retained copy
was read back, verified and loaded strictly. Runs anew in each pipeline run, and logs what cached stages already know.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from tasks.contract.layout import artifact_prefix
from tasks.contract.receipt import Receipt
from tasks.registry import Candidate, register_version
from tasks.report import run_report, summary
from tasks.stages.context import StageContext
from tasks.storage.artifact import find_receipt
from tasks.tracking import NullTracker, log_receipt

log = logging.getLogger("tasks")
_FILES = ("config.json", "model.safetensors")


def run(ctx: StageContext) -> Receipt:
    """Register the drafter, move aliases, log the report."""
    receipts = {name: ctx.receipt(name) for name in ctx.request.inputs}
    drafter = _retain(ctx, receipts["train"])
    _load_strictly(ctx, drafter)
    for receipt in receipts.values():
        _log_if_cached(ctx, receipt)
    facts = summary(receipts, ctx.spec)
    candidate = Candidate(
        model_name=ctx.spec.model_name or "drafter",
        digest=drafter.identity,
        address=f"{ctx.store.root.rstrip('/')}/{artifact_prefix('drafter', drafter.key)}",
        acceptance_length=receipts["measure"].metrics["acceptance_length"],
        lossless=bool(receipts["measure"].details["lossless"]),
        lineage=_lineage(ctx, receipts, drafter),
    )
    outcome: dict[str, Any] = {"registered": False, "reason": "MLflow is not configured"}
    if not isinstance(ctx.tracker, NullTracker):
        ctx.tracker.log_text(json.dumps(candidate.lineage, indent=2), "drafter/lineage.json")
        outcome = register_version(ctx.tracker, candidate, ctx.spec.minimum_acceptance)
    log.info("register: %s", outcome["reason"])
    facts |= {"gate": outcome["reason"], "mlflow_run_url": ctx.tracker.url, "drafter": candidate.address}
    report = run_report(facts)
    ctx.tracker.set_tags({"mlflow.note.content": report})
    ctx.tracker.log_text(report, "report.md")
    writer = ctx.writer()
    writer.add("report.md", report.encode())
    return ctx.publish(writer, details={"summary": facts, "registry": outcome, "drafter": drafter.ref().model_dump()})


def _retain(ctx: StageContext, train: Receipt) -> Receipt:
    """A copy of the weights that outlives the training's artifacts, keyed by what they are."""
    parts = [train.object(f"drafter/{name}") for name in _FILES]
    key = parts[1].sha256[:32]
    if found := find_receipt(ctx.store, "drafter", key):
        return found
    writer = ctx.writer("drafter", key)
    for name in _FILES:
        writer.add(name, ctx.fetch(train, f"drafter/{name}"))
    return ctx.publish(
        writer,
        identity=parts[1].sha256,
        inputs={"train": [train.identity]},
        details={"config": train.details["config"]},
    )


def _load_strictly(ctx: StageContext, drafter: Receipt) -> None:
    """Read the retained copy back from the store and load it: no missing, no unexpected tensor."""
    from tasks.drafter.serialization import load_drafter

    folder = ctx.scratch()
    for name in _FILES:
        (folder / name).write_bytes(ctx.fetch(drafter, name).read_bytes())
    load_drafter(folder)


def _log_if_cached(ctx: StageContext, receipt: Receipt) -> None:
    """Give this MLflow run the figures, series and plots of a stage that another run executed."""
    if ctx.tracker.has_tag(f"drafter.live.{receipt.kind}", receipt.key):
        return
    log_receipt(ctx.tracker, receipt)
    for stored in receipt.objects:
        if stored.name == "history.jsonl":
            for line in ctx.fetch(receipt, stored.name).read_text().splitlines():
                ctx.tracker.log_metrics(json.loads(line)["metrics"], step=json.loads(line)["step"])
        elif stored.name.startswith("figures/"):
            folder = ctx.scratch()
            file = folder / stored.name.rpartition("/")[2]
            file.write_bytes(ctx.fetch(receipt, stored.name).read_bytes())
            ctx.tracker.log_file(file, "plots")


def _lineage(ctx: StageContext, receipts: dict[str, Receipt], drafter: Receipt) -> dict[str, Any]:
    return {
        "drafter": {"digest": drafter.identity, "key": drafter.key},
        "target": {"name": receipts["target"].details["name"], "digest": receipts["target"].identity},
        "receipts": {name: {"key": receipt.key, "digest": receipt.digest()} for name, receipt in receipts.items()},
        "versions": receipts["train"].versions,
        "spec": ctx.spec.model_dump(mode="json"),
        "run_id": ctx.request.run.run_id,
    }
