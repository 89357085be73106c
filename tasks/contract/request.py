"""What a stage is asked to do, as one JSON document: the only thing an operator hands to a container."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.contract.receipt import ReceiptRef
from tasks.contract.spec import RunSpec
from tasks.contract.stages import stage_key


class RunContext(BaseModel):
    """Which run a stage works for: names, never secrets."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    task: str = "task"  # task id, with the map index where there is one: extract-3
    job: str = "job"  # deterministic job name, without the try number
    try_number: int = 1
    airflow_url: str | None = None  # address of the Dag run's page
    mlflow_run_id: str | None = None
    track: bool = True  # False: a run inside a run (the smoke stage's), not logged to MLflow


class StageRequest(BaseModel):
    """One stage, its spec, inputs and arguments."""

    schema_version: int = 1
    stage: str
    store: str  # root of the artifact store
    spec: RunSpec
    inputs: dict[str, list[ReceiptRef]] = {}
    args: dict[str, Any] = {}
    run: RunContext

    def key(self) -> str:
        """Content key of the result asked for."""
        return stage_key(self.stage, self.spec, self.inputs, self.args, self.run.run_id)
