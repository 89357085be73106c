"""The Dag `train_drafter` for real: Airflow, S3, MLflow, and a tiny hybrid target (3 Gated DeltaNet : 1 full)."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from operators.embedded.airflow_client import ApiError, request_json
from tasks.contract.errors import ConfigurationError
from tasks.contract.layout import failure_path
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.storage.artifact import read_receipt

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
DAG = "train_drafter"
STAGES = (
    "plan", "target", "tokenize", "assemble", "smoke", "extract", "verify", "prove", "check", "reference", "train",
    "measure", "register",
)  # fmt: skip


@pytest.fixture(scope="session")
def hybrid(stack, tmp_path_factory) -> dict[str, Any]:
    """Parameters of a run on the tiny hybrid target."""
    folder = tmp_path_factory.mktemp("hybrid")
    code = (
        "import json, sys; from pathlib import Path; from tasks.target.tiny_hybrid import *; f = Path(sys.argv[1]);"
        "write_tiny_hybrid(f / 'target');"
        "(f / 'rows.jsonl').write_text(''.join(json.dumps(r) + '\\n' for r in SAMPLE_ROWS))"
    )
    run_tasks(stack, ["-c", code, str(folder)])
    return {
        "target": str(folder / "target"), "sources": [str(folder / "rows.jsonl")], "max_length": 256,
        "validation_share": 0.3, "shard_tokens": 256, "layer_ids": [1, 3, 6], "block_size": 4, "draft_layers": 2,
        "sliding_layers": 1, "sliding_window": 16, "batch_tokens": 256, "epochs": 3, "max_new_tokens": 10,
        "measure_prompts": 2, "smoke_hybrid": False, "states_dtype": "float32", "checkpoint_steps": 1,
    }  # fmt: skip


def run_tasks(stack, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the task side's Python; its output is shown if it fails."""
    env = {**stack.environment, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [env["DRAFTER_TASKS_PYTHON"], *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900
    )
    if done.returncode and not environment:
        pytest.fail(done.stderr)
    return done


def trigger(stack, conf: dict[str, Any]) -> str:
    run = f"test-{secrets.token_hex(4)}"
    stack.client.trigger(DAG, run, conf)
    return run


def wait(stack, run: str, seconds: float = 900, look: Callable[[], None] = lambda: None) -> str:
    """Wait for the run's end; returns its state. A failed task's log is shown."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = stack.client.run(DAG, run)["state"]
        if state in ("success", "failed"):
            return str(state)
        look()
        time.sleep(1)
    pytest.fail(f"run {run} did not end in {seconds} s; states: {states(stack, run)}")


def instances(stack, run: str) -> list[dict[str, Any]]:
    return list(stack.client.task_instances(DAG, run))


def states(stack, run: str) -> dict[str, str]:
    return {f"{i['task_id']}[{i['map_index']}]": i["state"] for i in instances(stack, run)}


def result(stack, run: str, task: str, index: int = -1) -> dict[str, Any]:
    return dict(stack.client.xcom(DAG, run, task, index))


def receipt(stack, run: str, task: str, index: int = -1) -> Receipt:
    ref = ReceiptRef(**result(stack, run, task, index)["ref"])
    found = read_receipt(stack.store(), ref.kind, ref.key)
    assert found.digest() == ref.digest
    return found


def mlflow(stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return request_json("POST", f"{stack.mlflow_url}/api/2.0/mlflow/{path}", body)


def mlflow_runs(stack, run: str) -> list[dict[str, Any]]:
    experiment = request_json(
        "GET", f"{stack.mlflow_url}/api/2.0/mlflow/experiments/get-by-name?experiment_name=drafters"
    )["experiment"]["experiment_id"]
    body = {"experiment_ids": [experiment], "filter": f"tags.`drafter.run_id` = '{run}'"}
    return list(mlflow(stack, "runs/search", body).get("runs", []))


def explain(stack, run: str) -> str:
    return json.dumps(states(stack, run), indent=1)


def assert_finished_mlflow_run(stack, run: str) -> dict[str, float]:
    [found] = mlflow_runs(stack, run)
    assert found["info"]["status"] == "FINISHED"
    return {metric["key"]: metric["value"] for metric in found["data"]["metrics"]}


@pytest.fixture(scope="session")
def finished(stack, hybrid) -> str:
    """A finished run on the tiny hybrid."""
    run = trigger(stack, hybrid)
    assert wait(stack, run) == "success", explain(stack, run)
    return run


def test_a_hybrid_goes_through_all_stages(stack, finished):
    assert {i["task_id"] for i in instances(stack, finished)} >= set(STAGES)
    measure = receipt(stack, finished, "measure")
    assert measure.details["lossless"] is True
    assert measure.metrics["acceptance_length"] >= 1.0
    assert measure.metrics["replay_acceptance_length"] == measure.metrics["acceptance_length"]
    assert receipt(stack, finished, "check").details["verdict"] == "pass"
    metrics = assert_finished_mlflow_run(stack, finished)
    assert metrics["measure/acceptance_length"] == measure.metrics["acceptance_length"]
    assert {"train/loss", "assemble/samples", "check/shards"} <= set(metrics)


def test_the_drafter_is_registered_with_its_lineage(stack, finished):
    register = receipt(stack, finished, "register").details
    query = f"name={register['registry']['model']}&alias=challenger"
    url = f"{stack.mlflow_url}/api/2.0/mlflow/registered-models/alias?{query}"
    version = request_json("GET", url)["model_version"]
    tags = {tag["key"]: tag["value"] for tag in version["tags"]}
    drafter = read_receipt(stack.store(), "drafter", register["drafter"]["key"])
    assert tags["drafter.digest"] == drafter.identity == drafter.object("model.safetensors").sha256
    assert tags["drafter.address"] == f"{stack.store_root}/drafter/{drafter.key}"


def test_a_second_run_finds_everything_and_starts_only_what_checks_the_surroundings(stack, hybrid, finished):
    run = trigger(stack, hybrid)
    assert wait(stack, run) == "success", explain(stack, run)
    for task in ("target", "assemble", "smoke", "check", "reference", "train", "measure"):
        assert result(stack, run, task)["ref"] == result(stack, finished, task)["ref"], task
    folders = (Path(stack.environment["DRAFTER_HOME"]) / "jobs").iterdir()
    jobs = [p.name.rpartition("-")[0] for p in folders if p.is_dir()]
    assert jobs.count("extract") == len([i for i in instances(stack, finished) if i["task_id"] == "extract"])
    metrics = assert_finished_mlflow_run(stack, run)
    assert {"measure/acceptance_length", "train/loss"} <= set(metrics)  # a cached stage's figures are logged, too


@pytest.mark.parametrize("stage", ["extract", "train"])
def test_a_killed_task_is_retried_to_the_same_result(stack, hybrid, tmp_path, stage):
    """SIGKILL of the stage's process in its work; one MLflow run, no shard twice, the weights of an undisturbed run."""
    conf = {**hybrid, "seed": 7 if stage == "extract" else 8, "epochs": 6}
    killed: list[int] = []

    def kill() -> None:
        if not killed and (pid := working_process(stack, run, stage)):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    run = trigger(stack, conf)
    assert wait(stack, run, look=kill) == "success", explain(stack, run)
    assert killed, "the task ended before it could be killed"
    tries = max(i["try_number"] for i in instances(stack, run) if i["task_id"] == stage)
    assert tries == 2
    assert_finished_mlflow_run(stack, run)
    assert not [pid for pid in killed if Path(f"/proc/{pid}").exists()]
    undisturbed = tmp_path / "store"
    arguments = [f"--set={name}={json.dumps(value)}" for name, value in conf.items()]
    run_tasks(stack, ["-m", "tasks", "chain", "--store", str(undisturbed), "--until", "train", *arguments])
    [other] = [Receipt.model_validate_json(p.read_bytes()) for p in (undisturbed / "train").glob("*/receipt.json")]
    weights = receipt(stack, run, "train").object("drafter/model.safetensors").sha256
    assert other.object("drafter/model.safetensors").sha256 == weights


def working_process(stack, run: str, stage: str) -> int | None:
    """Process of a stage of this run that has done some of its work: a shard, or a checkpoint."""
    for folder in (Path(stack.environment["DRAFTER_HOME"]) / "jobs").glob(f"{stage}-*"):
        try:
            request = json.loads((folder / "request.json").read_text())
            log = (folder / "log").read_bytes()
        except OSError:
            continue
        if request["run"]["run_id"] != run or not (b"checkpoint at step 1" in log or b"loaded in" in log):
            continue
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"run" in command and str(folder / "request.json").encode() in command and b"tasks" in command:
                return int(process.name)
    return None


# ---- what is refused, and where --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "field"),
    [({"block_size": 1}, "block_size"), ({"validation_share": 0}, "validation_share"),
     ({"validation_share": 1}, "validation_share"), ({"layer_ids": ["a"]}, "layer_ids"),
     ({"states_dtype": "float16"}, "states_dtype"), ({"sources": []}, "sources")],
)  # fmt: skip
def test_the_form_refuses_a_wrong_value(stack, conf, field):
    with pytest.raises(ApiError) as caught:
        trigger(stack, conf)
    assert caught.value.status == 400
    assert field in str(caught.value)


def test_plan_refuses_what_only_the_target_can_tell_all_at_once(stack, hybrid, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    conf = {**hybrid, "layer_ids": [1, 65], "mask_token": 2, "sources": [str(empty)]}
    run = trigger(stack, conf)
    assert wait(stack, run) == "failed"
    assert {i["task_id"] for i in instances(stack, run) if i["state"] == "failed"} == {"plan"}
    [plan] = [i for i in instances(stack, run) if i["task_id"] == "plan"]
    assert plan["try_number"] == 1  # a wrong parameter is not retried
    reports = [stack.store().read(o.path) for o in stack.store().list(failure_path(run, "").rpartition("/")[0])]
    [report] = [json.loads(data) for data in reports]
    assert set(report["fields"]) == {"layer_ids", "mask_token", "sources"}
    assert "0..7" in report["message"]
    assert "end token" in report["message"]


def test_an_unknown_parameter_names_the_nearest(stack, hybrid):
    run = trigger(stack, {**hybrid, "blokc_size": 4})
    assert wait(stack, run) == "failed"
    log = stack.client.log_lines(DAG, run, "plan", -1, 1)
    assert any("did you mean 'block_size'" in line for line in log)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, ("store", "AWS_SECRET_ACCESS_KEY")),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, ("store", "AWS_ENDPOINT_URL_S3")),
        ({"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}, ("MLFLOW_TRACKING_URI",)),
    ],
)
def test_plan_names_the_surroundings_that_are_wrong(stack, hybrid, environment, words):
    arguments = [f"--set={name}={json.dumps(value)}" for name, value in hybrid.items()]
    root = stack.store_root.replace("pipeline", "refused")
    done = run_tasks(
        stack, ["-m", "tasks", "chain", "--until", "plan", "--store", root, *arguments],
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="1", **environment,
    )  # fmt: skip
    assert done.returncode == ConfigurationError.exit_code, done.stderr
    for word in words:
        assert word in done.stderr
