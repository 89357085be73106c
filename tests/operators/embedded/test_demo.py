from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from operators.embedded import __main__ as command_line
from operators.embedded.airflow_client import AirflowClient, ApiError
from operators.embedded.demo import collect_receipts, explain_failure, print_table
from operators.embedded.errors import EmbeddedError, RunFailed
from operators.embedded.follow import Follower, progress_line
from operators.embedded.summary import figures, mlflow_run_url
from tasks.contract.errors import ConfigurationError, FailureReport, Problem
from tasks.contract.layout import failure_path, progress_path, receipt_path
from tasks.contract.receipt import Receipt
from tasks.storage import open_store

RUN = "demo__2026-01-02T03.04.05.000006"


def receipt(stage: str, **parts: Any) -> Receipt:
    return Receipt(kind=stage, version=1, key=f"key-of-{stage}", identity=f"key-of-{stage}", **parts)


@pytest.fixture
def receipts() -> dict[str, Receipt]:
    return {
        "assemble": receipt(
            "assemble",
            counts={"read": 1200, "kept": 1100, "rejected": 100, "tokens": 250_000, "supervised_tokens": 120_000},
            details={"rejected": {"too_short": 60, "not_json": 40, "no_answer": 0}},
        ),
        "check": receipt("check", details={"verdict": "pass", "shards": [{}] * 41}),
        "train": receipt("train", counts={"steps": 630}, metrics={"loss": 4.25}),
        "measure": receipt(
            "measure",
            metrics={
                "acceptance_length": 1.2345,
                "replay_acceptance_length": 1.25,
                "tokens_per_second_drafter": 30.0,
                "tokens_per_second_plain": 40.0,
            },
        ),
        "register": receipt("register", details={"summary": {"mlflow_run_url": "http://127.0.0.1:1/#/runs/2"}}),
    }


def test_figures_come_from_the_receipts(receipts: dict[str, Receipt]) -> None:
    rows = dict(figures(dict(reversed(receipts.items()))))
    assert rows["Samples read"] == "1,200"
    assert rows["Samples rejected"] == "100 (not_json: 40, too_short: 60)"
    assert (rows["Shards"], rows["Integrity check"]) == ("41", "pass")
    assert (rows["Training steps"], rows["Training loss"]) == ("630", "4.250")
    assert rows["Acceptance length, real decoding"] == "1.234"
    assert rows["Acceptance length, replay"] == "1.250"
    assert rows["Tokens/s with drafter"] == "30.0 (0.75 of plain)"
    assert mlflow_run_url(receipts) == "http://127.0.0.1:1/#/runs/2"


def test_missing_figures_are_all_named(receipts: dict[str, Receipt]) -> None:
    receipts["measure"].metrics.pop("tokens_per_second_plain")
    receipts["train"].counts.pop("steps")
    with pytest.raises(RunFailed) as failure:
        figures(receipts)
    assert "receipt of measure: metrics.tokens_per_second_plain" in str(failure.value)
    assert "receipt of train: counts.steps" in str(failure.value)
    with pytest.raises(RunFailed, match="mlflow_run_url"):
        mlflow_run_url({"register": receipt("register")})


def test_table_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = "100 (" + "x" * 150 + ")"
    print_table([("Samples rejected", reasons), ("[bold]odd[/bold]", "[3]")])
    output = capsys.readouterr().out
    assert reasons in output
    assert "[bold]odd[/bold]" in output


class FakeAirflow(http.server.BaseHTTPRequestHandler):
    """Answers from a table of (method, path without query) to (status, body); pages task instances by two."""

    answers: ClassVar[dict[tuple[str, str], tuple[int, Any]]] = {}
    polls: ClassVar[list[list[dict[str, Any]]]] = []

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/auth/token":
            wanted = {"username": "admin", "password": "secret"}
            self._send(*((201, {"access_token": "t"}) if json.loads(body) == wanted else (401, {"detail": "no"})))
            return
        if self.headers.get("Authorization") != "Bearer t":
            self._send(401, {"detail": "Not authenticated"})
            return
        path = path.removeprefix("/api/v2")
        if path.endswith("/taskInstances") and self.polls:
            offset = int(query.rpartition("offset=")[2])
            entries = self.polls[0]
            page = entries[offset : offset + 2]
            if offset + 2 >= len(entries) and len(self.polls) > 1:
                self.polls.pop(0)
            self._send(200, {"task_instances": page, "total_entries": len(entries)})
            return
        if path == f"/dags/d/dagRuns/{RUN}":
            self._send(200, {"state": "success" if len(self.polls) == 1 else "running"})
            return
        self._send(*self.answers.get((self.command, path), (404, {"detail": f"nothing at {path}"})))

    do_GET = do_POST = do_PATCH = _answer

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def airflow() -> Iterator[AirflowClient]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeAirflow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    FakeAirflow.answers, FakeAirflow.polls = {}, []
    yield AirflowClient(f"http://127.0.0.1:{server.server_port}", "admin", "secret")
    server.shutdown()
    server.server_close()


def entry(task: str, state: str | None, index: int = -1, try_number: int = 1) -> dict[str, Any]:
    return {
        "task_id": task,
        "map_index": index,
        "state": state,
        "try_number": try_number,
        "duration": 4.2,
        "start_date": None,
    }


def test_follower_prints_each_change_once_and_progress(airflow: AirflowClient, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    progress = {"task": "extract-1", "label": "extract", "unit": "samples", "done": 1024, "total": 4096, "rate": 33.1}
    progress |= {"seconds_left": 92.8, "updated_at": 0.0, "try_number": 1, "tokens_per_second": 410.25}
    store.write(progress_path(RUN, "extract-1"), json.dumps(progress).encode())
    report = FailureReport.of("extract", OSError("the disk is full\nand more"))
    store.write(failure_path(RUN, "job-7"), report.model_dump_json().encode())
    FakeAirflow.polls = [
        [entry("plan", "running"), entry("extract", None), entry("train", None)],
        [
            entry("plan", "success"),
            entry("extract", "running", 0),
            entry("extract", "running", 1),
            entry("train", None),
        ],
        [entry("plan", "success"), entry("extract", "success", 0), entry("extract", "up_for_retry", 1)],
        [entry("plan", "success"), entry("extract", "success", 0), entry("extract", "success", 1, 2)],
    ]
    lines: list[str] = []
    assert Follower(airflow, store, "d", RUN, lines.append, poll_seconds=0.01).follow() == "success"
    said = [" ".join(line.split()[1:]) for line in lines]
    assert said.count("plan running") == said.count("plan success in 4 s") == 1
    assert said.count("extract[0] success in 4 s") == 1
    assert said.index("extract[1] running") < said.index("extract[1] up_for_retry")
    assert said[said.index("extract[1] up_for_retry") + 1] == "extract[1] OSError: the disk is full"
    assert said[-1] == "extract[1] success in 4 s (try 2)"
    reported = "extract-1 extract: 1,024 of 4,096 samples, 33.1/s, 1 min 33 s left, tokens per second 410.2"
    assert said.count(reported) == 1
    assert not [line for line in said if line.startswith("train")]


def test_progress_that_is_complete_shows_no_time_left() -> None:
    progress = {"task": "t", "label": "train", "unit": "steps", "done": 5, "total": 5, "rate": 2.0, "seconds_left": 0.0}
    assert progress_line(progress) == "train: 5 of 5 steps, 2.0/s"


def test_receipts_are_found_through_what_the_tasks_returned(
    airflow: AirflowClient, tmp_path: Path, receipts: dict[str, Receipt]
) -> None:
    store = open_store(str(tmp_path))
    for stage, made in receipts.items():
        store.write(receipt_path(stage, made.key), made.to_bytes())
        path = f"/dags/d/dagRuns/{RUN}/taskInstances/{stage}/xcomEntries/return_value"
        value: Any = {"ref": made.ref().model_dump(), "counts": {}, "metrics": {}, "address": "a"}
        FakeAirflow.answers["GET", path] = (200, {"value": json.dumps(value) if stage == "train" else value})
    assert collect_receipts(airflow, store, "d", RUN) == receipts
    tampered = receipts["train"].model_copy(update={"counts": {"steps": 1}})
    store.write(receipt_path("train", tampered.key), tampered.to_bytes())
    with pytest.raises(RunFailed, match=r"receipt of train/key-of-train: digest .* in the store, .* in Airflow"):
        collect_receipts(airflow, store, "d", RUN)
    del FakeAirflow.answers["GET", f"/dags/d/dagRuns/{RUN}/taskInstances/register/xcomEntries/return_value"]
    store.write(receipt_path("train", tampered.key), receipts["train"].to_bytes())
    with pytest.raises(RunFailed, match="task register returned nothing"):
        collect_receipts(airflow, store, "d", RUN)


def test_failure_shows_report_or_log_and_address(airflow: AirflowClient, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    error = ConfigurationError(Problem("layer_ids", [1, 65], "ids from 0 to 63"))
    store.write(failure_path(RUN, "job-1"), FailureReport.of("plan", error).model_dump_json().encode())
    FakeAirflow.polls = [[entry("plan", "failed"), entry("extract", "failed", 2, 3), entry("train", "upstream_failed")]]
    log = {"content": [{"event": f"line {i}"} for i in range(50)]}
    FakeAirflow.answers["GET", f"/dags/d/dagRuns/{RUN}/taskInstances/extract/logs/3"] = (200, log)
    text = explain_failure(airflow, store, "d", RUN)
    assert "ConfigurationError: layer_ids: found [1, 65]; expected ids from 0 to 63" in text
    assert f"{airflow.url}/dags/d/runs/{RUN}/tasks/plan" in text
    assert "Task extract[2] failed at try 3" in text
    assert f"{airflow.url}/dags/d/runs/{RUN}/tasks/extract/mapped/2" in text
    assert "| line 49" in text
    assert "| line 29" not in text
    assert "train" not in text


def test_client_says_what_the_api_refused(airflow: AirflowClient) -> None:
    FakeAirflow.answers["PATCH", "/dags/d"] = (200, {})
    FakeAirflow.answers["POST", "/dags/d/dagRuns"] = (400, {"detail": "block_size: 1 is less than the minimum of 2"})
    with pytest.raises(ApiError, match="HTTP 400: block_size: 1 is less than the minimum of 2") as refusal:
        airflow.trigger("d", RUN, {"block_size": 1})
    assert refusal.value.status == 400
    with pytest.raises(ApiError, match="HTTP 401"):
        AirflowClient(airflow.url, "admin", "wrong").rest("GET", "/dags")


def test_broken_dag_file_is_named(airflow: AirflowClient) -> None:
    broken = {"filename": "train_drafter.py", "stack_trace": "SyntaxError: line 3"}
    FakeAirflow.answers["GET", "/importErrors"] = (200, {"import_errors": [broken], "total_entries": 1})
    with pytest.raises(EmbeddedError, match=r"(?s)'train_drafter'.*train_drafter\.py.*SyntaxError: line 3"):
        airflow.wait_for_dag("train_drafter", 0.5)


@pytest.mark.parametrize("conf", ["[1]", "{", "epochs=2"])
def test_conf_must_be_a_json_object(conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command_line.main(["demo", "--conf", conf])
    assert exit_.value.code == 2
    assert "expected a JSON object" in capsys.readouterr().err
