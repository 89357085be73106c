"""The task graph of the pipeline, as one function: every Dag that trains a drafter is built by it.

plan -> target -> tokenize[group of files] -> assemble -> smoke -> extract[group of shards]
     -> verify[group], prove[group] -> check -> train -> measure -> register
                               smoke -> reference -> train
all of them -> close_run (teardown: ends the MLflow run)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import TriggerRule, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from operators.container import ContainerTaskOperator, plan_details
from operators.grouping import balanced_groups
from operators.results import refs_of
from tasks.contract.receipt import ReceiptRef
from tasks.contract.stages import STAGES
from tasks.storage import open_store
from tasks.storage.artifact import read_receipt

log = logging.getLogger(__name__)

GPU_POOL = os.environ.get("DRAFTER_GPU_POOL", "gpu")
MAX_MAPPED = 1000  # Airflow refuses more than 1,024 mapped tasks ([core] max_map_length)
RETRIES = 3  # at least 2: a restart of Airflow's API server ends the waiting task, and its retry adopts the job
TIMEOUTS = {
    "plan": timedelta(hours=1),
    "smoke": timedelta(hours=2),
    "verify": timedelta(hours=12),
    "register": timedelta(hours=1),
    "extract": timedelta(days=3),
    "train": timedelta(days=7),
}
DEFAULT_TIMEOUT = timedelta(days=1)


def default_args() -> dict[str, Any]:
    """Arguments of every task. `DRAFTER_RETRY_DELAY`: seconds before another try."""
    return {
        "retries": RETRIES,
        "retry_delay": timedelta(seconds=float(os.environ.get("DRAFTER_RETRY_DELAY", "10"))),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=10),
    }


def build_pipeline() -> None:
    """Add the pipeline's tasks to the Dag whose `with` block this is called in."""
    plan = ContainerTaskOperator(**_stage("plan"))
    target = _run("target", plan, plan_args={"fingerprint": "target_fingerprint"})
    files = file_groups(plan.output)
    tokenize = _map("tokenize", plan, {"target": target.output}, "file group").expand(args=files)
    assemble = _run("assemble", plan, target=target, tokenize=tokenize)
    smoke = _run("smoke", plan, target=target, assemble=assemble)

    groups = shard_groups(plan.output, assemble.output)
    extract = _map("extract", plan, {"target": target.output}, "shard group").expand(group=groups)
    verify = _map("verify", plan, {}, "shard group").expand(group=extract.output)
    prove = _map("prove", plan, {"target": target.output}, "shard group").expand(group=extract.output)
    # It must speak when a group failed: wait for all of them and say how many there are, instead of being passed over.
    check = ContainerTaskOperator(
        **_stage("check"),
        plan=plan.output,
        inputs={name: op.output for name, op in _named(assemble, extract, verify, prove).items()},
        expect={"extract": groups, "verify": groups, "prove": groups},
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
    )
    reference = _run("reference", plan, target=target, assemble=assemble)
    train = _run("train", plan, target=target, check=check, reference=reference)
    measure = _run("measure", plan, target=target, train=train, reference=reference)
    register = _run(
        "register", plan, target=target, assemble=assemble, check=check, reference=reference, train=train,
        measure=measure,
    )  # fmt: skip

    smoke >> [groups, reference]
    close = close_run(plan.output).as_teardown()
    [target, files, tokenize, assemble, smoke, groups, extract, verify, prove, check, reference, train, measure,
     register] >> close  # fmt: skip


def _named(*operators: Any) -> dict[str, Any]:
    return {operator.task_id: operator for operator in operators}


def _stage(stage: str) -> dict[str, Any]:
    """Arguments that the tasks of a stage have in common, mapped or not."""
    arguments: dict[str, Any] = {
        "task_id": stage,
        "stage": stage,
        "execution_timeout": TIMEOUTS.get(stage, DEFAULT_TIMEOUT),
        "doc_md": STAGES[stage].summary,
    }
    if STAGES[stage].needs_gpu:
        arguments["pool"] = GPU_POOL
    return arguments


def _run(stage: str, plan: Any, plan_args: Mapping[str, str] | None = None, **inputs: Any) -> ContainerTaskOperator:
    results = {name: operator.output for name, operator in inputs.items()}
    return ContainerTaskOperator(**_stage(stage), plan=plan.output, plan_args=plan_args, inputs=results)


def _map(stage: str, plan: Any, inputs: Mapping[str, Any], label: str) -> Any:
    """Text around the index in `map_index_template`: Airflow 3.3.2 fails on one that renders to a number."""
    return ContainerTaskOperator.partial(
        **_stage(stage),
        plan=plan.output,
        inputs=dict(inputs),
        map_index_template=f"{label} {{{{ ti.map_index }}}}",
    )


@task(execution_timeout=timedelta(minutes=30))
def file_groups(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arguments of the mapped `tokenize` tasks: `{"files": ...}`, a group of source files each, as planned."""
    groups = [{"files": files} for files in plan_details(plan)["file_groups"]]
    return _checked(groups, "file groups", "there is no source file to tokenize")


@task(execution_timeout=timedelta(minutes=30))
def shard_groups(plan: Mapping[str, Any], assemble: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Groups of token shards for the mapped `extract` tasks, balanced by tokens: receipt references as dicts."""
    [ref] = refs_of(assemble)
    shards = read_receipt(open_store(str(assemble["store"])), ref.kind, ref.key).details["shards"]
    groups = group_shards(shards, int(plan_details(plan)["spec"]["extract_groups"]))
    for number, group in enumerate(groups):
        log.info("Group %d: %d shards", number, len(group))
    return _checked(groups, "shard groups", "no row was kept: the counts by reason are in the result of assemble")


def group_shards(shards: Sequence[Mapping[str, Any]], n: int) -> list[list[dict[str, Any]]]:
    """References of token shards in at most `n` groups of nearly equal numbers of tokens.

    Args:
        shards: as in the details of `assemble`'s receipt: `ref`, `tokens` of each.
        n: most groups.
    """
    groups = balanced_groups(shards, n, lambda shard: int(shard["tokens"]))
    return [[ReceiptRef.model_validate(shard["ref"]).model_dump() for shard in group] for group in groups]


def _checked(groups: list[Any], what: str, empty: str) -> list[Any]:
    # A mapped task over nothing would be skipped, and everything after it: a run that did nothing would look fine.
    if not groups:
        raise AirflowFailException(f"{what}: found 0; expected at least one: {empty}")
    if len(groups) > MAX_MAPPED:
        raise AirflowFailException(f"{what}: found {len(groups)}; expected at most {MAX_MAPPED} mapped tasks")
    return groups


@task(task_id="close_run", execution_timeout=timedelta(minutes=10))
def close_run(plan: Mapping[str, Any] | None) -> str | None:
    """End the MLflow run as the Dag run ends: FINISHED, FAILED, or KILLED if people ended it. Returns that state.

    A teardown: it runs whatever happened, and its success does not make a failed Dag run green.
    """
    context = get_current_context()
    ti = context["ti"]
    states = ti.get_task_states(ti.dag_id, run_ids=[ti.run_id])[ti.run_id]
    outcome = mlflow_outcome({name: str(state) for name, state in states.items() if name != ti.task_id})
    run_id = plan_details(plan).get("mlflow_run_id") if plan else None
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        log.info("MLflow is not configured: nothing to close")
        return None
    return end_mlflow_run(outcome, ti.run_id, run_id)


def mlflow_outcome(states: Mapping[str, str]) -> str:
    """MLflow's final state for the states of a Dag run's tasks.

    Nothing in this pipeline skips a task, so a skipped or removed one means that the Dag run was ended by hand.
    """
    found = set(states.values())
    if found & {"skipped", "removed"}:
        return "KILLED"
    return "FINISHED" if found == {"success"} else "FAILED"


def end_mlflow_run(outcome: str, dag_run: str, run_id: str | None) -> str | None:
    """Set the final state of the MLflow run of a Dag run. Returns it, or None if there is no such run.

    Args:
        outcome: FINISHED, FAILED or KILLED.
        dag_run: Airflow's run id; finds the MLflow run of a `plan` that failed after creating it.
        run_id: MLflow's, where known.
    """
    # A dead server must not hold the end of a Dag run up for the client's default of many minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    from mlflow import MlflowClient  # heavy: not at parse time

    client = MlflowClient()
    found = [run_id] if run_id else _runs_of(client, dag_run)
    for run in found:
        client.set_terminated(run, status=outcome)
        log.info("MLflow run %s: %s", run, outcome)
    return outcome if found else None


def _runs_of(client: Any, dag_run: str) -> list[str]:
    name = dag_run.replace("'", "")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    if not experiments:
        return []
    return [run.info.run_id for run in client.search_runs(experiments, f"tags.`drafter.run_id` = '{name}'")]
