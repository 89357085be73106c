"""One operator, real jobs (stub stages under the process launcher), a folder store."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from operators.joblog import LINE_CHARACTERS
from operators.outage import airflow_answers
from operators.verdict import StageFailed
from tasks.contract.layout import receipt_path


def eventually(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def forked(task: Any) -> int:
    """Run `task` in a child process: the Airflow worker that is going to be killed."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            task()
        os._exit(0)
    return pid


# ---- results --------------------------------------------------------------------------------------------------------


def test_result_is_the_receipts_address_digest_and_numbers(deployment):
    result = deployment.run("target", plan_args={"fingerprint": "target_fingerprint"})
    assert set(result) == {"ref", "counts", "metrics", "address", "store"}
    assert result["counts"] == {"samples": 3}
    assert result["metrics"] == {"loss": 1.5}
    path = receipt_path("target", result["ref"]["key"])
    assert result["address"] == f"{deployment.store.root}/{path}"
    assert deployment.store.exists(path)
    assert len(json.dumps(result)) < 10_000
    assert "stub target: receipt" in deployment.log


def test_arguments_from_the_plan_are_part_of_the_key(deployment):
    with_fingerprint = deployment.run("target", plan_args={"fingerprint": "target_fingerprint"})
    without = deployment.run("target")
    assert with_fingerprint["ref"]["key"] != without["ref"]["key"]


def test_second_run_finds_the_result_and_starts_nothing(deployment):
    first = deployment.run("target")
    deployment.behave("exit 1")
    assert deployment.run("target") == first
    assert len(deployment.starts()) == 1
    assert "already in the store" in deployment.log


def test_plan_runs_for_each_dag_run_and_takes_the_form(deployment):
    operator = deployment.operator("plan")
    context = deployment.context(operator, params={"preset": "smoke", "block_size": 4, "draft_layers": None})
    result = operator.execute(context)
    receipt = json.loads(deployment.store.read(receipt_path("plan", result["ref"]["key"])))
    assert receipt["details"]["spec"]["block_size"] == 4
    assert receipt["details"]["spec"]["max_samples"] == 64
    again = deployment.operator("plan")
    assert again.execute(deployment.context(again, params=context["params"])) == result
    assert len(deployment.starts()) == 2


def test_misspelled_key_of_the_conf_fails_at_once_with_the_nearest_name(deployment):
    from types import SimpleNamespace

    operator = deployment.operator("plan")
    context = deployment.context(operator, dag_run=SimpleNamespace(conf={"blokc_size": 99}))
    with pytest.raises(AirflowFailException, match=r"blokc_size: found 99.*did you mean 'block_size'"):
        operator.execute(context)
    assert deployment.starts() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("validation_share", 0), ("validation_share", 1), ("block_size", 1), ("layer_ids", []), ("layer_ids", [1, 1])],
)
def test_wrong_parameter_is_refused_by_name_before_any_job(deployment, field, value):
    operator = deployment.operator("plan")
    with pytest.raises(AirflowFailException, match=f"{field}: found"):
        operator.execute(deployment.context(operator, params={"preset": "demo", field: value}))
    assert deployment.starts() == []


def test_no_store_anywhere_is_a_configuration_error(deployment):
    deployment.monkeypatch.delenv("DRAFTER_STORE")
    with pytest.raises(AirflowFailException, match="store: found None"):
        deployment.run("plan")


def test_links_are_pushed_early_and_asked_for_again_at_the_end(deployment):
    deployment.behave("exit 1")
    operator = deployment.operator("target", plan=deployment.plan())
    context = deployment.context(operator)
    with pytest.raises(StageFailed):
        operator.execute(context)
    url = "http://127.0.0.1:5000/#/experiments/7/runs/0123abcd"
    assert context["ti"].pushed == {"_link_MlflowRunLink": url}
    mlflow, receipt = operator.operator_extra_links
    assert mlflow.get_link(operator, ti_key=None) == url
    assert receipt.get_link(operator, ti_key=None) == ""
    deployment.behave("receipt")
    result = operator.execute(context)
    assert receipt.get_link(operator, ti_key=None) == result["address"]
    deployment.monkeypatch.setenv("MLFLOW_PUBLIC_URL", "https://mlflow.example.com/")
    result = operator.execute(context)
    assert mlflow.get_link(operator, ti_key=None) == "https://mlflow.example.com/#/experiments/7/runs/0123abcd"


def test_check_counts_the_groups_that_gave_a_result(deployment):
    """ORC-14: one failed mapped task."""
    ref = {"kind": "extract", "key": "1" * 32, "identity": "1" * 32, "digest": "1" * 64}
    inputs = {"extract": [{"ref": ref} for _ in range(7)], "verify": [], "assemble": None}
    with pytest.raises(AirflowFailException) as error:
        deployment.run("check", inputs=inputs, expect={"extract": range(8), "verify": range(8)})
    assert "extract: 7 of 8 tasks gave a result" in str(error.value)
    assert "verify: 0 of 8" in str(error.value)
    assert "assemble: 0 of 1" in str(error.value)
    assert deployment.starts() == []


# ---- verdicts -------------------------------------------------------------------------------------------------------


def test_output_is_never_the_result(deployment):
    """ORC-08: JSON on stdout, then a warning on stderr."""
    deployment.behave("noise")
    result = deployment.run("target")
    assert result["ref"]["kind"] == "target"
    assert "UserWarning: this comes after the result" in deployment.log


def test_exit_0_without_receipt_is_a_failure(deployment):
    deployment.behave("no receipt")
    with pytest.raises(StageFailed, match="exit code 0 without a receipt"):
        deployment.run("target")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("wrong key", "is of target/" + "f" * 32),
        ("wrong version", "version 99"),
        ("not a receipt", "receipt target/.*remove"),
        ("nan metric", "metrics must be finite numbers"),
        ("wrong hash", "object data.bin should have 13 bytes and SHA-256 .*, found SHA-256"),
    ],
)
def test_receipt_that_is_not_this_tasks_is_refused(deployment, how, message):
    deployment.behave(how)
    with pytest.raises(AirflowFailException, match=message):
        deployment.run("target")


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("exit 1", StageFailed, "exit code 1"),
        ("exit 74", StageFailed, "StorageError: exit code 74"),
        ("exit 66", AirflowFailException, "IntegrityError: exit code 66"),
        ("exit 137", StageFailed, r"exit code 137 \(SIGKILL; .*out of memory"),
        ("kill", StageFailed, r"exit code 137 \(SIGKILL"),
        ("segfault", StageFailed, r"exit code 139 \(SIGSEGV"),
    ],
)
def test_exit_code_decides_whether_another_try_is_made(deployment, how, error, message):
    deployment.behave(how)
    with pytest.raises(AirflowException, match=message) as caught:
        deployment.run("target")
    assert type(caught.value) is error


def test_failure_report_is_what_a_person_reads(deployment):
    deployment.behave("report 64")
    with pytest.raises(AirflowFailException, match="ConfigurationError: block_size: found 1; expected at least 2"):
        deployment.run("target")
    assert "target failed: ConfigurationError (exit code 64, not retried" in deployment.log
    assert "Field: block_size" in deployment.log


@pytest.mark.slow
def test_report_of_another_end_does_not_explain_this_one(deployment):
    """An earlier try left its report in the store; this one was killed."""
    from tasks.contract.errors import DataError, FailureReport
    from tasks.contract.layout import failure_path

    deployment.behave("kill")
    operator = deployment.operator("target", plan=deployment.plan())
    context = deployment.context(operator)
    request = operator._build_request(context)
    old = FailureReport.of("target", DataError("empty"))
    deployment.store.write(failure_path(request.run.run_id, request.run.job), old.model_dump_json().encode())
    with pytest.raises(StageFailed, match="SIGKILL"):
        operator.execute(context)
    deployment.behave("exit 65")
    with pytest.raises(AirflowFailException, match="DataError: empty"):
        operator.execute(context)


def test_long_lines_and_foreign_bytes_pass_through_the_log(deployment):
    deployment.behave("line")
    deployment.run("target")
    long = next(line for line in deployment.lines if line.startswith("xxx"))
    assert len(long) < LINE_CHARACTERS + 100
    assert "(5,000,000 characters" in long
    assert "after the long line" in deployment.lines
    deployment.behave("bytes")
    deployment.run("target", plan_args={"fingerprint": "target_fingerprint"})
    assert "caf\ufffd \ufffd\ufffd end" in deployment.lines


def test_slow_job_is_waited_for(deployment):
    deployment.behave("slow 1.2")
    assert deployment.run("target")["ref"]["kind"] == "target"
    assert "slow: awake" in deployment.log


def test_task_sees_no_secret_of_airflow(deployment):
    """ORC-20, on the process launcher."""
    deployment.monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "hush-fernet")
    deployment.monkeypatch.setenv("AIRFLOW_CONN_STORE", "hush-conn")
    deployment.monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-s3")
    deployment.behave("environment")
    result = deployment.run("target")
    seen = [line for line in deployment.lines if line.startswith("environment ")]
    assert any(line.startswith("environment AWS_SECRET_ACCESS_KEY=") for line in seen)
    assert not any("hush-fernet" in line or "hush-conn" in line or "AIRFLOW" in line for line in seen)
    deployment.lines.clear()
    # What the project itself writes down holds no secret either.
    written = [path for path in (deployment.folder / "home").rglob("*.json") if path.is_file()]
    assert len(written) >= 3
    assert not any("hush" in path.read_text() for path in written)
    assert "hush" not in json.dumps(result)


def test_unknown_launcher_names_what_exists(deployment):
    deployment.monkeypatch.setenv("DRAFTER_LAUNCHER", "moon")
    with pytest.raises(AirflowFailException, match=r"DRAFTER_LAUNCHER: found 'moon'; expected one of \['process'\]"):
        deployment.run("target")


@pytest.mark.parametrize("name", ["DRAFTER_HOME", "DRAFTER_TASKS_PYTHON"])
def test_missing_setting_of_the_launcher_is_named(deployment, name):
    deployment.monkeypatch.delenv(name)
    with pytest.raises(AirflowFailException, match=f"{name}: found None"):
        deployment.run("target")


# ---- kills and retries ----------------------------------------------------------------------------------------------


def test_kill_ends_the_job_and_all_it_started_within_five_seconds(deployment, alive):
    """ORC-02: main process and grandchildren ignore SIGTERM, in sessions of their own."""
    deployment.behave("family")
    operator = deployment.operator("target", plan=deployment.plan())
    took: list[float] = []

    def kill() -> None:
        eventually(lambda: len(deployment.family()) == 3)
        started = time.monotonic()
        operator.on_kill()
        took.append(time.monotonic() - started)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(StageFailed, match="because Airflow ended this task"):
        operator.execute(deployment.context(operator))
    thread.join()
    assert took[0] < 5
    assert not any(alive(pid) for pid in deployment.family())
    assert deployment.launcher.status(operator._request.run.job).exit_code == 137
    # And the next try starts afresh.
    deployment.behave("receipt")
    again = deployment.operator("target", plan=deployment.plan())
    again.execute(deployment.context(again, try_number=2))
    assert [line.split()[2] for line in deployment.starts()] == ["1", "2"]


@pytest.mark.slow
def test_job_outlives_an_outage_of_airflow(deployment):
    """The supervisor ends the task when Airflow's API is gone, with the same signal as when people do."""
    deployment.behave("slow 2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/execution/"
    deployment.monkeypatch.setenv("AIRFLOW__CORE__EXECUTION_API_SERVER_URL", address)
    plan = deployment.plan()
    operator = deployment.operator("target", plan=plan)
    context = deployment.context(operator)

    def kill() -> None:
        eventually(deployment.starts)
        operator.on_kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(StageFailed, match=r"did not answer; job .* goes on"):
        operator.execute(context)
    thread.join()
    assert deployment.launcher.status(operator._request.run.job).state == "running"
    retry = deployment.operator("target", plan=plan)
    assert retry.execute(deployment.context(retry, try_number=2))["ref"]["kind"] == "target"
    assert len(deployment.starts()) == 1


def test_airflow_that_answers_anything_is_there(deployment):
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/execution/"
        deployment.monkeypatch.setenv("AIRFLOW__CORE__EXECUTION_API_SERVER_URL", address)
        assert airflow_answers()  # 501: this server knows no GET
        thread.join()
    assert not airflow_answers()


def test_processes_left_behind_end_with_the_job(deployment, alive):
    deployment.behave("leave")
    deployment.run("target")
    assert len(deployment.family()) == 3
    assert not any(alive(pid) for pid in deployment.family())


def test_retry_adopts_the_job_of_a_killed_worker_and_has_its_result(deployment):
    deployment.behave("slow 3")
    plan = deployment.plan()
    operator = deployment.operator("target", plan=plan)
    context = deployment.context(operator)
    worker = forked(lambda: operator.execute(context))
    eventually(lambda: context["task_state_store"].get("drafter_job") and deployment.starts())
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    retry = deployment.operator("target", plan=plan)
    result = retry.execute(deployment.context(retry, try_number=2))
    assert result["ref"]["kind"] == "target"
    assert len(deployment.starts()) == 1
    assert "following it from here" in deployment.log
    assert "slow: awake" in deployment.log
    assert context["task_state_store"].get("drafter_job") is None


@pytest.mark.slow
def test_retry_finds_the_result_of_a_job_that_finished_while_nobody_looked(deployment):
    deployment.behave("slow 0.5")
    operator = deployment.operator("plan")
    context = deployment.context(operator)
    worker = forked(lambda: operator.execute(context))
    eventually(lambda: context["task_state_store"].get("drafter_job"))
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    job = context["task_state_store"].get("drafter_job")
    eventually(lambda: deployment.launcher.status(job).succeeded)
    retry = deployment.operator("plan")
    assert retry.execute(deployment.context(retry, try_number=2))["ref"]["kind"] == "plan"
    assert len(deployment.starts()) == 1


@pytest.mark.slow
def test_retry_after_the_inputs_changed_ends_the_old_job(deployment, alive):
    """ORC-13: state kept under the task's name must not be inherited by other work."""
    deployment.monkeypatch.setattr("operators.launchers.process.GRACE_SECONDS", 0.3)
    deployment.behave("family")
    plan = deployment.plan()
    operator = deployment.operator("target", plan=plan, args={"fingerprint": "old"})
    context = deployment.context(operator)
    worker = forked(lambda: operator.execute(context))
    eventually(lambda: context["task_state_store"].get("drafter_job") and len(deployment.family()) == 3)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    old = deployment.family()
    deployment.behave("receipt")
    retry = deployment.operator("target", plan=plan, args={"fingerprint": "new"})
    result = retry.execute(deployment.context(retry, try_number=2))
    assert not any(alive(pid) for pid in old)
    assert result["ref"]["key"] == retry._request.key()


@pytest.mark.slow
def test_two_copies_at_once_share_one_job(deployment):
    """ORC-23."""
    deployment.behave("slow 1.5")
    plan = deployment.plan()
    results: list[Any] = []

    def copy() -> None:
        operator = deployment.operator("target", plan=plan)
        results.append(operator.execute(deployment.context(operator)))

    threads = [threading.Thread(target=copy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(deployment.starts()) == 1
    assert len(results) == 3
    assert results[0] == results[1] == results[2]


def test_job_name_depends_on_task_and_work_not_on_the_try(deployment):
    plan = deployment.plan()

    def name(**changes: Any) -> str:
        arguments = {"plan": plan, "args": changes.pop("args", None)}
        operator = deployment.operator("target", **arguments)
        context = deployment.context(operator, try_number=changes.pop("try_number", 1))
        for field, value in changes.items():
            setattr(context["ti"], field, value)
        return operator._build_request(context).run.job

    assert name() == name(try_number=4)
    others = [name(run_id="r2"), name(dag_id="d2"), name(task_id="t2"), name(map_index=1), name(args={"a": 1})]
    assert len({name(), *others}) == 6
    assert all(len(job) <= 63 and job.replace("-", "").isalnum() and job == job.lower() for job in others)
