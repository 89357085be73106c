"""The Dag's structure: what waits for what, what is mapped over what, pools, retries."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import TriggerRule
from airflow.serialization.serialized_objects import DagSerialization

from tasks.contract.spec import RunSpec
from tasks.contract.stages import STAGES

STAGE_TASKS = [
    "plan", "target", "tokenize", "assemble", "smoke", "extract", "verify", "prove", "check", "reference", "train",
    "measure", "register",
]  # fmt: skip
MAPPED = {"tokenize", "extract", "verify", "prove"}


@pytest.fixture
def dag(dagbag):
    return dagbag.dags["train_drafter"]


def test_every_dag_file_loads(dagbag):
    assert dagbag.import_errors == {}
    assert {Path(dag.fileloc).name for dag in dagbag.dags.values()} >= {"train_drafter.py"}


def test_dag_survives_serialization(dagbag):
    for dag in dagbag.dags.values():
        stored = json.loads(json.dumps(DagSerialization.serialize_dag(dag)))
        again = DagSerialization.deserialize_dag(stored)
        assert set(again.task_dict) == set(dag.task_dict)
        for task in dag.tasks:
            assert again.task_dict[task.task_id].downstream_task_ids == task.downstream_task_ids
        assert {name: param.schema for name, param in dag.params.items()} == {
            name: param["schema"] if isinstance(param, dict) else param.schema
            for name, param in ((n, again.params.get_param(n)) for n in dag.params)
        }


def test_serialized_dag_does_not_change_between_parses(dag):
    """What varies would make a new Dag version at each parse."""
    again = DagBag(str(Path(dag.fileloc).parent)).dags["train_drafter"]
    assert DagSerialization.serialize_dag(again) == DagSerialization.serialize_dag(dag)


def test_parse_is_fast(dag):
    started = time.process_time()
    DagBag(str(Path(dag.fileloc).parent))
    assert time.process_time() - started < 0.5


def test_tasks_and_inputs(dag):
    """Each stage waits for the stages whose results it takes."""
    assert set(dag.task_dict) == {*STAGE_TASKS, "file_groups", "shard_groups", "close_run"}
    for stage in STAGE_TASKS:
        upstream = dag.task_dict[stage].upstream_task_ids
        if stage != "plan":
            assert "plan" in upstream
        expected = {name if name != "tokens" else "shard_groups" for name in STAGES[stage].inputs}
        assert expected <= upstream, stage
    assert "smoke" in dag.task_dict["shard_groups"].upstream_task_ids  # nothing is expanded before the smoke stage
    assert "smoke" in dag.task_dict["reference"].upstream_task_ids
    assert "extract" not in dag.task_dict["reference"].upstream_task_ids  # it runs beside the extraction


def test_mapping(dag):
    for stage in STAGE_TASKS:
        assert dag.task_dict[stage].is_mapped == (stage in MAPPED), stage
    for stage in MAPPED:
        # Text around the index: Airflow 3.3.2 fails on a template that renders to a number.
        assert dag.task_dict[stage].partial_kwargs["map_index_template"].split()[0] in ("file", "shard")


def test_gpu_stages_are_in_the_gpu_pool(dag):
    for stage in STAGE_TASKS:
        assert dag.task_dict[stage].pool == ("gpu" if STAGES[stage].needs_gpu else "default_pool"), stage


def test_retries_and_timeouts(dag):
    for task in dag.tasks:
        assert task.retries == 3
        assert task.execution_timeout is not None
    assert timedelta(seconds=1) <= dag.task_dict["plan"].retry_delay <= timedelta(seconds=30)


def test_check_speaks_when_a_group_failed_and_all_else_waits_for_success(dag):
    rules = {task.task_id: task.trigger_rule for task in dag.tasks}
    assert rules.pop("check") == TriggerRule.ALL_DONE_MIN_ONE_SUCCESS
    assert rules.pop("close_run") == TriggerRule.ALL_DONE_SETUP_SUCCESS
    assert set(rules.values()) == {TriggerRule.ALL_SUCCESS}


def test_teardown_waits_for_everything_and_does_not_decide_the_run(dag):
    close = dag.task_dict["close_run"]
    assert close.is_teardown
    assert not close.on_failure_fail_dagrun
    assert close.upstream_task_ids == set(dag.task_dict) - {"close_run"}


def test_form(dag):
    assert list(dag.params) == ["preset", *RunSpec.model_fields]
    dag.params.validate()
    assert dag.schedule is None
    assert dag.catchup is False
