"""Whole Dag runs through Airflow's own task runner and a migrated database, with stub stages.

Slow (database, seconds for each task); the scheduler itself is in tests/end_to_end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "tests" / "operators" / "stub_tasks.py"
CASES: dict[str, dict[str, Any]] = {
    "success": {"conf": {"preset": "smoke"}, "stub": {"extract-1": "fail once"}},
    "again": {"conf": {"preset": "smoke"}, "stub": {"extract": "exit 1", "train": "exit 1"}},
    "one group fails": {
        "conf": {"preset": "smoke", "block_size": 4, "layer_ids": [1, 3]},
        "stub": {"extract-1": "exit 66"},
    },
    "misspelled": {"conf": {"blokc_size": 99}, "stub": {}},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("airflow")
    python = folder / "tasks-python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" "$@"\n')
    python.chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "MLFLOW", "DRAFTER"))},
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "PYTHONPATH": str(ROOT),
        "DRAFTER_HOME": str(folder / "home"),
        "DRAFTER_STORE": str(folder / "store"),
        "DRAFTER_TASKS_PYTHON": str(python),
        "DRAFTER_RETRY_DELAY": "1",
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # the server's database is tested end to end
        "STUB_STARTS": str(folder / "starts"),
        "STUB_PIDS": str(folder / "pids"),
    }
    airflow = Path(sys.executable).with_name("airflow")
    subprocess.run([airflow, "db", "migrate"], env=environment, check=True, capture_output=True, timeout=300)
    driver = Path(__file__).with_name("run_dag.py")
    arguments = [sys.executable, str(driver), str(ROOT / "dags"), json.dumps(list(CASES.values()))]
    with (folder / "log").open("w") as log:
        subprocess.run(arguments, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=580, check=False)
    text = (folder / "log").read_text()
    lines = [line.removeprefix("CASE ") for line in text.splitlines() if line.startswith("CASE ")]
    assert len(lines) == len(CASES), text[-6000:]
    cases = dict(zip(CASES, map(json.loads, lines), strict=True))
    return {**cases, "log": text, "starts": (folder / "starts").read_text().splitlines()}


def states(case: dict[str, Any]) -> dict[str, str]:
    return {name: values[0] for name, values in case["tasks"].items()}


def test_whole_run_succeeds_with_a_retry_of_one_mapped_task(found):
    case = found["success"]
    assert case["run"] == "success"
    assert set(states(case).values()) == {"success"}
    assert {"tokenize-0", "tokenize-1", "extract-0", "extract-1", "verify-1", "prove-1"} <= set(case["tasks"])
    assert case["tasks"]["extract-1"][1:] == [2, "shard group 1"]
    assert case["tasks"]["extract-0"][1:] == [1, "shard group 0"]
    assert case["mlflow"] == "FINISHED"


def test_second_run_starts_only_what_each_run_executes(found):
    """ORC-12: what has a receipt is not done again, though its stage would fail now."""
    case = found["again"]
    assert case["run"] == "success"
    started = [line.split()[0] for line in found["starts"]]
    assert started.count("plan") == started.count("register") + 1 == 3  # a third for the case with a failed group
    assert started.count("train") == 1


def test_failed_group_stops_before_training_and_is_counted(found):
    """ORC-14, ORC-07: nothing after the check runs, nothing turns green, the MLflow run is ended."""
    case = found["one group fails"]
    assert case["run"] == "failed"
    found_states = states(case)
    assert found_states["extract-0"] == "success"
    assert found_states["extract-1"] == "failed"
    assert case["tasks"]["extract-1"][1] == 1  # an integrity error is not retried
    assert found_states["check"] == "failed"
    assert "extract: 1 of 2 tasks gave a result" in found["log"]
    assert {found_states[name] for name in ("train", "measure", "register")} == {"upstream_failed"}
    assert found_states["close_run"] == "success"
    assert case["mlflow"] == "FAILED"


def test_misspelled_key_fails_the_first_task_with_a_suggestion(found):
    case = found["misspelled"]
    assert case["run"] == "failed"
    assert case["tasks"]["plan"][:2] == ["failed", 1]
    assert states(case)["check"] == "upstream_failed"
    assert "did you mean 'block_size'" in found["log"]
