"""`make demo`: one run of the Dag `train_drafter` from the trigger to the table, through Airflow's REST API only."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from operators.embedded.airflow_client import AirflowClient, ApiError
from operators.embedded.errors import EmbeddedError, RunFailed
from operators.embedded.follow import Follower, failure_reports, task_name
from operators.embedded.services import airflow_client
from operators.embedded.settings import ADMIN, Settings
from operators.embedded.summary import STAGES, figures, mlflow_run_url
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.storage.artifact import read_receipt
from tasks.storage.base import Store

DAG_ID = "train_drafter"
RUN_PREFIX = "demo__"
_DAG_SECONDS = 180.0
_LOG_LINES = 20


def run_demo(
    settings: Settings, conf: Mapping[str, Any], *, dag_id: str = DAG_ID, say: Callable[[str], None] = print
) -> None:
    """Trigger the Dag (or join the run of the same parameters that is going on), follow it, print the table.

    Raises:
        RunFailed: if a task failed (with its failure report and the address of its log), or a figure is missing.
        EmbeddedError: if Airflow does not offer the Dag, or refuses a parameter.
    """
    client = airflow_client(settings)
    store = connect_store(settings)
    client.wait_for_dag(dag_id, _DAG_SECONDS)
    started = time.monotonic()
    run_id = _running(client, dag_id, conf)
    if run_id:
        say(f"Joining Dag run {run_id}, which is going on with the same parameters")
    else:
        run_id = RUN_PREFIX + datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H.%M.%S.%f")
        try:
            client.trigger(dag_id, run_id, conf)
        except ApiError as error:
            if error.status != 400:
                raise
            raise EmbeddedError(f"Airflow refused the parameters {json.dumps(dict(conf))}: {error.detail}") from error
        say(f"Triggered Dag run {run_id}")
    say(f"  watch it: {client.run_page(dag_id, run_id)}")
    say(f"  {login(settings)}")
    state = Follower(client, store, dag_id, run_id, say).follow()
    if state != "success":
        raise RunFailed(explain_failure(client, store, dag_id, run_id))
    receipts = collect_receipts(client, store, dag_id, run_id)
    took = ("Dag run took", f"{time.monotonic() - started:.0f} s")
    mlflow_run = mlflow_run_url(receipts)
    print_table([*figures(receipts), took])
    say(f"Airflow run  {client.run_page(dag_id, run_id)}\n             log in as {login(settings)}")
    say(f"MLflow run   {mlflow_run}\n             no login: it listens on this machine only")


def connect_store(settings: Settings) -> Store:
    """The artifact store of these services, opened from this process."""
    from tasks.storage import open_store

    # boto3 takes its keys from there. Replaced and not extended: the caller's AWS_PROFILE would come in between.
    wanted = settings.process_environment(settings.pipeline_environment())
    os.environ.clear()
    os.environ.update(wanted)
    return open_store(settings.store_root)


def login(settings: Settings) -> str:
    """How to log in to Airflow; the password itself only where a person reads it, not in a recorded log."""
    if sys.stdout.isatty():
        return f"user {ADMIN}, password {settings.credentials.airflow_password}"
    return f"user {ADMIN}, password in {settings.home.passwords_file}"


def _running(client: AirflowClient, dag_id: str, conf: Mapping[str, Any]) -> str | None:
    """A run of ours with these parameters that has not finished."""
    runs = client.rest_all(f"/dags/{dag_id}/dagRuns?state=running&state=queued", "dag_runs")
    for run in runs:
        if run["dag_run_id"].startswith(RUN_PREFIX) and (run["conf"] or {}) == dict(conf):
            return str(run["dag_run_id"])
    return None


def collect_receipts(client: AirflowClient, store: Store, dag_id: str, run_id: str) -> dict[str, Receipt]:
    """Receipts of the stages whose figures are shown, found through what the tasks returned.

    Raises:
        RunFailed: if a task returned no receipt reference, or the store's receipt is another one.
    """
    receipts = {}
    for stage in STAGES:
        try:
            value = client.xcom(dag_id, run_id, stage)
        except ApiError as error:
            raise RunFailed(f"task {stage} returned nothing (XCom return_value): {error}") from error
        if not isinstance(value, dict) or "ref" not in value:
            raise RunFailed(f"task {stage} returned {str(value)[:200]!r}; expected a receipt reference under 'ref'")
        ref = ReceiptRef(**value["ref"])
        receipt = read_receipt(store, ref.kind, ref.key)
        if receipt.digest() != ref.digest:
            raise RunFailed(
                f"receipt of {ref.kind}/{ref.key}: digest {receipt.digest()} in the store, {ref.digest} in Airflow; "
                "it was replaced while the run went on: run the demo again"
            )
        receipts[stage] = receipt
    return receipts


def explain_failure(client: AirflowClient, store: Store, dag_id: str, run_id: str) -> str:
    """Failed tasks of a run, each with its failure report (or the end of its log) and the address of its log."""
    entries = client.task_instances(dag_id, run_id)
    failed = [entry for entry in entries if entry["state"] == "failed"]
    reports = failure_reports(store, run_id)
    texts = [f"Dag run {run_id} failed: {client.run_page(dag_id, run_id)}"]
    for entry in failed:
        texts.append(f"\nTask {task_name(entry)} failed at try {entry['try_number']}")
        own = [report for report in reports if report.stage == entry["task_id"]]
        texts += [f"  {report.error}: {report.message}".replace("\n", "\n    ") for report in own]
        if not own:
            texts += [f"  | {line}" for line in _log_end(client, dag_id, run_id, entry)]
        texts.append(f"  log: {client.task_page(dag_id, run_id, entry['task_id'], entry['map_index'])}")
    if not failed:
        states = ", ".join(f"{task_name(entry)} {entry['state']}" for entry in entries)
        texts.append(f"no task failed itself; states: {states or 'none was started'}")
    return "\n".join(texts)


def _log_end(client: AirflowClient, dag_id: str, run_id: str, entry: Mapping[str, Any]) -> list[str]:
    try:
        lines = client.log_lines(dag_id, run_id, entry["task_id"], entry["map_index"], entry["try_number"])
    except ApiError as error:
        return [f"(its log cannot be read: {error})"]
    return lines[-_LOG_LINES:]


def print_table(rows: list[tuple[str, str]]) -> None:
    """Two columns, as wide as they need, whatever the terminal's width: nothing is cut."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title="The drafter", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    width = max(len(name) for name, _ in rows) + max(len(value) for _, value in rows) + 7  # borders and padding
    Console(width=width, highlight=False, markup=False).print(table)
