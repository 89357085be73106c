"""The stages in order, in one process: what the Dag does, without Airflow.

The smoke stage and people at a command line use it. Every stage is executed by the same function as in a container,
finds the same receipts and writes the same artifacts, so a run by hand and a Dag run share their work.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.contract.request import RunContext, StageRequest
from tasks.contract.spec import RunSpec
from tasks.execution import execute
from tasks.storage import open_store
from tasks.storage.base import Store
from tasks.tracking import Tracker

log = logging.getLogger("tasks")


@dataclass
class Chain:
    """Runs stages one after the other over one store."""

    spec: RunSpec
    root: str
    run_id: str
    store: Store
    tracker: Tracker | None = None
    cache: Path | None = None
    mlflow_run_id: str | None = None
    results: dict[str, list[Receipt]] = field(default_factory=dict)

    def stage(
        self,
        name: str,
        inputs: Mapping[str, Sequence[ReceiptRef]] | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> Receipt:
        """Execute one stage and remember its receipt."""
        run = RunContext(
            run_id=self.run_id,
            task=name,
            job=f"{name}-{self.run_id}",
            mlflow_run_id=self.mlflow_run_id,
            track=self.tracker is None,
        )
        request = StageRequest(
            stage=name,
            store=self.root,
            spec=self.spec,
            inputs={key: list(refs) for key, refs in (inputs or {}).items()},
            args=dict(args or {}),
            run=run,
        )
        receipt = execute(request, store=self.store, tracker=self.tracker, cache=self.cache)
        self.results.setdefault(name, []).append(receipt)
        return receipt

    def refs(self, name: str) -> list[ReceiptRef]:
        """References to the receipts of a stage that has run."""
        return [receipt.ref() for receipt in self.results[name]]

    def use(self, receipt: Receipt) -> None:
        """Take a receipt made elsewhere as the result of its stage."""
        self.results[receipt.kind] = [receipt]

    # ---- the parts of the chain -------------------------------------------------------------------------------------

    def plan(self) -> None:
        """`plan`: from here on the spec is the resolved one."""
        receipt = self.stage("plan")
        self.spec = RunSpec(**receipt.details["spec"])
        self.mlflow_run_id = receipt.details["mlflow_run_id"]

    def prepare_tokens(self, until: str | None = None) -> None:
        """`target`, `tokenize` for each group of files, `assemble`."""
        plan = self.results["plan"][0]
        self.stage("target", args={"fingerprint": plan.details["target_fingerprint"]})
        if until == "target":
            return
        for group in plan.details["file_groups"]:
            self.stage("tokenize", {"target": self.refs("target")}, {"files": group})
        if until == "tokenize":
            return
        self.stage("assemble", {"target": self.refs("target"), "tokenize": self.refs("tokenize")})

    def smoke(self) -> None:
        """`smoke`: the rest of the chain on five samples."""
        self.stage("smoke", {"target": self.refs("target"), "assemble": self.refs("assemble")})

    def extract_and_check(self, until: str | None = None) -> None:
        """`extract`, `verify`, `prove` of all shards as one group, then `check`."""
        target, assemble = self.refs("target"), self.results["assemble"][0]
        shards = [ReceiptRef(**entry["ref"]) for entry in assemble.details["shards"]]
        self.stage("extract", {"target": target, "tokens": shards})
        if until == "extract":
            return
        self.stage("verify", {"extract": self.refs("extract")})
        if until == "verify":
            return
        self.stage("prove", {"target": target, "extract": self.refs("extract")})
        if until == "prove":
            return
        names = ("assemble", "extract", "verify", "prove")
        self.stage("check", {name: self.refs(name) for name in names})

    def train_and_measure(self, until: str | None = None) -> None:
        """`reference`, `train`, `measure`."""
        target = self.refs("target")
        self.stage("reference", {"target": target, "assemble": self.refs("assemble")})
        if until == "reference":
            return
        reference = self.refs("reference")
        self.stage("train", {"target": target, "check": self.refs("check"), "reference": reference})
        if until == "train":
            return
        self.stage("measure", {"target": target, "train": self.refs("train"), "reference": reference})

    def register(self) -> None:
        """`register`: the model version and the gate."""
        names = ("target", "assemble", "check", "reference", "train", "measure")
        self.stage("register", {name: self.refs(name) for name in names})


def run_chain(
    spec: RunSpec,
    root: str,
    run_id: str,
    *,
    until: str | None = None,
    store: Store | None = None,
    tracker: Tracker | None = None,
    cache: Path | None = None,
    smoke: bool = True,
) -> dict[str, list[Receipt]]:
    """Run the whole chain, or the part that ends with the stage `until`.

    Args:
        spec: as asked for; `plan` resolves it.
        root: the artifact store's root.
        run_id: name of this run, for progress, failures and MLflow.
        until: last stage to execute.
        store: the store, if it is open already.
        tracker: where to log; by default the MLflow run that `plan` makes, if MLFLOW_TRACKING_URI is set.
        cache: folder for local copies.
        smoke: execute the smoke stage (off inside the smoke stage itself).

    Returns:
        The receipts by stage.
    """
    chain = Chain(spec, root, run_id, store or open_store(root), tracker, cache)
    chain.plan()
    parts = (
        (("target", "tokenize", "assemble"), lambda: chain.prepare_tokens(until)),
        (("smoke",), chain.smoke if smoke else lambda: None),
        (("extract", "verify", "prove", "check"), lambda: chain.extract_and_check(until)),
        (("reference", "train", "measure"), lambda: chain.train_and_measure(until)),
        (("register",), chain.register),
    )
    if until != "plan":
        for names, part in parts:
            part()
            if until in names:
                break
    return chain.results
