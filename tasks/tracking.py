"""MLflow: the one module that knows its names. One MLflow run per pipeline run, whatever the retries.

Experiment: `spec.experiment`. Run name: the pipeline run's id. Tags: `drafter.run_id` (finds the run again at a retry),
`drafter.target`, `drafter.revision`, `drafter.airflow_url`. Parameters: every field of the resolved spec. Metrics:
`<stage>/<name>`; series of the training carry the optimizer step. Uses the client with an explicit run id throughout,
so a run id in the environment changes nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tasks.contract.errors import ConfigurationError, Problem
from tasks.contract.receipt import Receipt
from tasks.contract.request import RunContext
from tasks.contract.spec import RunSpec
from tasks.provenance import revision

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("tasks")
TAG_RUN = "drafter.run_id"
_PARAMETER_LIMIT = 500  # characters; the whole spec is stored as an artifact besides


class Tracker(Protocol):
    """Where a stage logs what people look at."""

    run_id: str | None
    url: str | None

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers. Values that are not finite are refused (ValueError): they would be stored as something else."""

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log short parameters, once."""

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Set or replace tags."""

    def has_tag(self, name: str, value: str) -> bool:
        """Whether the run has this tag with this value."""

    def log_text(self, text: str, path: str) -> None:
        """Store a text artifact."""

    def log_file(self, file: Path, folder: str = "") -> None:
        """Store a local file as an artifact."""


class NullTracker:
    """Logs nothing: stages run by hand without MLflow."""

    run_id: str | None = None
    url: str | None = None

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Check, like the real one, and drop."""
        _finite(values)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Drop."""

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Drop."""

    def has_tag(self, name: str, value: str) -> bool:
        """Never."""
        return False

    def log_text(self, text: str, path: str) -> None:
        """Drop."""

    def log_file(self, file: Path, folder: str = "") -> None:
        """Drop."""


class MlflowTracker:
    """Logs to one run of an MLflow tracking server."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self.run_id: str | None = run_id
        self._run = run_id
        experiment = client.get_run(run_id).info.experiment_id
        base = str(client.tracking_uri).rstrip("/")
        self.url: str | None = f"{base}/#/experiments/{experiment}/runs/{run_id}"

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log a batch of numbers at one step."""
        import time

        from mlflow.entities import Metric

        _finite(values)
        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step or 0) for name, value in values.items()]
        for start in range(0, len(metrics), 900):  # the server takes at most 1,000 a batch
            self._client.log_batch(self._run, metrics=metrics[start : start + 900])

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log short parameters; a value that differs from one already logged names the key.

        Raises:
            ConfigurationError: if the run already has another value.
        """
        from mlflow.entities import Param

        old = self._client.get_run(self._run).data.params
        new = {name: _short(value) for name, value in values.items()}
        changed = [
            Problem(n, v, f"{old[n]!r}, as already logged to this MLflow run")
            for n, v in new.items()
            if n in old and old[n] != v
        ]
        if changed:
            raise ConfigurationError(changed)
        params = [Param(name, value) for name, value in new.items() if name not in old]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[start : start + 100])

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Set tags; the same tag again is replaced."""
        for name, value in values.items():
            self._client.set_tag(self._run, name, value)

    def has_tag(self, name: str, value: str) -> bool:
        """Whether the run has this tag with this value."""
        return bool(self._client.get_run(self._run).data.tags.get(name) == value)

    def log_text(self, text: str, path: str) -> None:
        """Store a text artifact."""
        self._client.log_text(self._run, text, path)

    def log_file(self, file: Path, folder: str = "") -> None:
        """Store a local file."""
        self._client.log_artifact(self._run, str(file), folder or None)


def open_tracker(run: RunContext) -> Tracker:
    """The tracker of a stage: the run that `plan` created, or none where MLflow is not configured."""
    if not run.mlflow_run_id or not tracking_uri():
        return NullTracker()
    return MlflowTracker(_client(), run.mlflow_run_id)


def tracking_uri() -> str | None:
    """Address of the tracking server (MLFLOW_TRACKING_URI)."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def create_run(spec: RunSpec, run: RunContext) -> MlflowTracker:
    """Find the run of this pipeline run, or create it. A retry, or a second live copy, finds the first one's.

    Raises:
        ConfigurationError: field `MLFLOW_TRACKING_URI`, if the server does not answer.
    """
    from mlflow.exceptions import MlflowException

    client = _client()
    try:
        found = client.get_experiment_by_name(spec.experiment)
        experiment = found.experiment_id if found else client.create_experiment(spec.experiment)
        name = run.run_id.replace("'", "")
        runs = client.search_runs([experiment], f"tags.`{TAG_RUN}` = '{name}'", max_results=1)
        if runs:
            client.update_run(runs[0].info.run_id, status="RUNNING")
            return MlflowTracker(client, runs[0].info.run_id)
        tags = {TAG_RUN: name, "drafter.target": spec.target, "drafter.revision": revision()}
        if run.airflow_url:
            tags["drafter.airflow_url"] = run.airflow_url
        created = client.create_run(experiment, run_name=name, tags=tags)
        return MlflowTracker(client, created.info.run_id)
    except MlflowException as error:
        problem = Problem("MLFLOW_TRACKING_URI", tracking_uri(), f"a tracking server that answers ({error})")
        raise ConfigurationError(problem) from error


def log_spec(tracker: Tracker, spec: RunSpec) -> None:
    """The resolved spec: each field as a parameter, the whole as an artifact."""
    tracker.log_params(spec.model_dump(mode="json"))
    tracker.log_text(json.dumps(spec.model_dump(mode="json"), indent=2), "spec.json")


def log_receipt(tracker: Tracker, receipt: Receipt) -> None:
    """A receipt's counts and metrics as `<stage>/<name>`."""
    tracker.log_metrics({f"{receipt.kind}/{name}": float(value) for name, value in receipt.counts.items()})
    tracker.log_metrics({f"{receipt.kind}/{name}": value for name, value in receipt.metrics.items()})


def registry_client() -> MlflowClient:
    """Client of the model registry, which is the tracking server's."""
    return _client()


def _client() -> MlflowClient:
    # A dead server must fail a task in a minute, not after the client's default of many.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri())


def _finite(values: Mapping[str, float]) -> None:
    bad = {name: value for name, value in values.items() if not math.isfinite(value)}
    if bad:
        raise ValueError(f"metrics must be finite numbers, found {bad}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _PARAMETER_LIMIT else text[: _PARAMETER_LIMIT - 1] + "…"
