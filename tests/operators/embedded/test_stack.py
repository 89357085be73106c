"""The real thing: up, health, who listens where, status, a run with its log, a killed scheduler, stop, clean."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from operators.embedded import ports, services, stack
from operators.embedded.demo import connect_store
from operators.embedded.errors import EmbeddedError, ServiceFailed
from operators.embedded.follow import Follower
from operators.embedded.processes import read_records, running_processes
from operators.embedded.settings import PROJECT, Settings

DAG = """
import os, subprocess, sys
from airflow.sdk import Param, dag, task

@dag(schedule=None, params={"seconds": Param(0, type="integer", minimum=0)})
def tiny():
    @task
    def work(params=None):
        print("the work is done in", os.environ["DRAFTER_STORE"])
        code = f"import time; time.sleep({params['seconds']})"
        subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)
        return {"answer": 42}
    work()

tiny()
"""

pytestmark = [pytest.mark.services, pytest.mark.slow]


def traces(pid: int, home: Path, marker: str) -> bool:
    """Whether a process has anything to do with this stack: command line, environment or working folder."""
    process = Path("/proc") / str(pid)
    try:
        said = process.joinpath("cmdline").read_bytes() + process.joinpath("environ").read_bytes()
        return (
            str(home).encode() in said
            or marker.encode() in said
            or process.joinpath("cwd").readlink().is_relative_to(home)
        )
    except OSError:  # it has just ended
        return False


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "tiny.py").write_text(DAG)
    given = {name: value for name, value in os.environ.items() if name not in ports.VARIABLES.values()}
    given |= {"DRAFTER_HOME": str(tmp_path / "home"), "DRAFTER_DAGS_FOLDER": str(dags), "DRAFTER_GPU_SLOTS": "2"}
    if os.environ.get("DRAFTER_REQUIRE_SERVICES") != "1":
        try:
            services.require_installed(Settings.load(given))
        except EmbeddedError as error:
            pytest.skip(str(error))
    own = dict(os.environ)
    yield given
    stack.clean(given)
    os.environ.clear()  # connect_store replaces it
    os.environ.update(own)


def test_up_health_listeners_status_run_kill_stop(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(running_processes())
    settings = stack.up(environment, print)
    home = settings.home

    ours = home.processes()
    assert {record.name for record in read_records(home.records).values()} >= {"s3", "mlflow", "airflow-scheduler"}
    open_ = ports.listeners_of(ours)
    assert {listener.address for listener in open_} == {"127.0.0.1"}
    # every port we chose is open, gRPC included, and nothing else but those
    grpc = {port + ports.GRPC_OFFSET for name, port in settings.ports.items() if name.startswith("s3")}
    assert {listener.port for listener in open_} == set(settings.ports.values()) | grpc

    assert {entry.state for entry in stack.status(environment)} == {"healthy"}
    for pid in ours:  # no secret on any real command line, of a child either
        line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        assert settings.credentials.s3_secret_key not in line
        assert settings.credentials.airflow_jwt_secret not in line

    client = services.airflow_client(settings)
    assert client.rest("GET", "/pools/gpu")["slots"] == 2
    with pytest.raises(EmbeddedError, match="HTTP 401"):
        services.AirflowClient(settings.airflow_url, "admin", "admin").rest("GET", "/dags")

    client.wait_for_dag("tiny", 60)
    client.trigger("tiny", "run-1", {})
    lines: list[str] = []
    assert Follower(client, connect_store(settings), "tiny", "run-1", lines.append).follow() == "success", lines
    assert client.xcom("tiny", "run-1", "work") == {"answer": 42}
    assert "the work is done in s3://drafters/pipeline" in client.log_lines("tiny", "run-1", "work", -1, 1)

    # a second `up` starts nothing, and a changed setting only what it concerns
    assert stack.up(environment, print) is not None
    assert set(home.processes()) >= {pid for pid, stat in ours.items() if stat.parent not in ours}

    # SIGKILL the scheduler in the middle of a task: its workers and the task's own session are orphans now
    client.trigger("tiny", "run-2", {"seconds": 300})
    deadline = time.monotonic() + 60
    while not [e for e in client.task_instances("tiny", "run-2") if e["state"] == "running"]:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    time.sleep(2)
    os.kill(read_records(home.records)["airflow-scheduler"].pid, signal.SIGKILL)
    assert [entry.state for entry in stack.status(environment) if entry.title == "Airflow scheduler"] == ["dead"]

    stranger = subprocess.Popen(["sleep", "300"], cwd=home.path.parent, env={"PATH": os.environ["PATH"]})
    try:
        assert stack.stop(environment) >= 10
        assert home.processes() == {}
        left = set(running_processes()) - before  # other tests' processes may be among them
        assert stranger.pid in left
        ours_left = [pid for pid in left if traces(pid, home.path, settings.credentials.instance)]
        assert ours_left == [], [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ours_left]
        assert all(ports.is_free(port) for port in [*settings.ports.values(), *grpc])
        assert not list(Path("/tmp").glob(f"seaweedfs-*-grpc-{settings.ports['s3'] + ports.GRPC_OFFSET}.sock"))
    finally:
        stranger.kill()
        stranger.wait()
    assert {entry.state for entry in stack.status(environment)} == {"stopped"}
    capsys.readouterr()


def test_service_that_dies_is_reported_with_its_last_words(environment: dict[str, str]) -> None:
    """MLflow finds a database that is none. Everything that this start began is gone afterwards."""
    settings = Settings.load(environment)
    (settings.home.mlflow / "mlflow.db").write_text("this is not a database\n" * 100)
    with pytest.raises(
        ServiceFailed, match=r"(?s)MLflow ended with exit status 1.*last lines of .*mlflow\.log.*database"
    ):
        stack.up(environment, print)
    assert settings.home.processes() == {}


def test_command_line_names_the_taken_port(environment: dict[str, str]) -> None:
    settings = Settings.load(environment)
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", settings.ports["airflow"]))
        server.listen(1)
        done = subprocess.run(
            [sys.executable, "-m", "operators.embedded", "up"],
            cwd=PROJECT,
            env={**environment, "DRAFTER_AIRFLOW_PORT": str(settings.ports["airflow"])},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert (
        f"error: DRAFTER_AIRFLOW_PORT: port {settings.ports['airflow']} is taken by process {os.getpid()}"
        in done.stderr
    )
    assert settings.home.processes() == {}
