"""The process launcher, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from operators.launchers import process_shim
from operators.launchers.base import LOG_END, Job, LaunchError
from operators.launchers.process import KEEP_SECONDS, ProcessLauncher, task_environment


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    stat = process_shim.process_stat(pid)
    return stat is not None and stat[0] not in "ZX"


@pytest.fixture
def launcher(tmp_path: Path) -> Callable[[str], ProcessLauncher]:
    """A launcher whose "tasks Python" is a shell script of these lines."""

    def make(script: str) -> ProcessLauncher:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
        python.chmod(0o755)
        return ProcessLauncher(tmp_path / "home", str(python), project=tmp_path)

    return make


def ended(launcher: ProcessLauncher, name: str = "job") -> int:
    eventually(lambda: launcher.status(name).state != "running")
    code = launcher.status(name).exit_code
    assert code is not None
    return code


JOB = Job("job", b'{"stage": "target"}')


def test_job_gets_its_request_and_leaves_log_and_exit_code(launcher, tmp_path):
    processes = launcher('echo "$@"; cat "$5" 2>/dev/null; echo oops >&2; exit 7')
    assert processes.submit(JOB) is True
    assert ended(processes) == 7
    data, cursor = processes.logs("job")
    request = tmp_path / "home" / "jobs" / "job" / "request.json"
    assert data.decode().splitlines() == [f"-m tasks run --request {request}", '{"stage": "target"}oops']
    assert processes.logs("job", cursor) == (b"", cursor)
    status = json.loads((request.parent / "status.json").read_text())
    assert {"pid", "start", "boot", "child", "pgid"} <= set(status)
    assert not alive(status["pid"]) or ended(processes) == 7


def test_log_end_shows_the_last_of_what_was_printed(launcher):
    processes = launcher("yes 0123456789 | head -n 20000; echo last")
    processes.submit(JOB)
    ended(processes)
    data, cursor = processes.logs("job", LOG_END)
    assert data.endswith(b"last\n")
    assert len(data) == 1 << 16
    assert int(cursor) == 20000 * 11 + 5


def test_running_job_is_adopted_and_an_ended_one_created_again(launcher, tmp_path):
    processes = launcher("echo x >> starts; sleep 0.7; exit 3")
    assert processes.submit(JOB) is True
    assert processes.submit(JOB) is False
    assert ended(processes) == 3
    assert processes.submit(JOB) is True
    assert ended(processes) == 3
    assert (tmp_path / "starts").read_text() == "x\nx\n"


def test_many_submitters_start_one_job(launcher, tmp_path):
    """ORC-23: six processes at once."""
    processes = launcher("echo x >> starts; sleep 2")
    children = []
    for number in range(6):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                started = processes.submit(JOB)
                (tmp_path / f"result-{number}").write_text(str(started))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    answers = [(tmp_path / f"result-{number}").read_text() for number in range(6)]
    assert sorted(answers) == ["False"] * 5 + ["True"]
    eventually(lambda: (tmp_path / "starts").exists())
    assert (tmp_path / "starts").read_text() == "x\n"
    processes.stop("job", grace=0.2)


def test_submitter_may_die_at_once(launcher):
    processes = launcher("sleep 0.5; echo survived")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            processes.submit(JOB)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)
    assert ended(processes) == 0
    assert processes.logs("job")[0] == b"survived\n"


def test_stop_lets_the_job_save_what_it_has(launcher, tmp_path):
    processes = launcher('trap "echo saved > saved; exit 75" TERM; echo up > up; while :; do sleep 0.05; done')
    processes.submit(JOB)
    eventually((tmp_path / "up").exists)
    processes.stop("job")
    assert processes.status("job").exit_code == 75
    assert (tmp_path / "saved").read_text() == "saved\n"


def test_signal_is_128_plus_its_number(launcher):
    processes = launcher("kill -KILL $$")
    processes.submit(JOB)
    assert ended(processes) == 137


def test_killed_watcher_leaves_no_job_and_is_reported_lost(launcher, tmp_path):
    processes = launcher("echo $$ >> pids; setsid sh -c 'echo $$ >> pids; sleep 600' & sleep 600")
    processes.submit(JOB)
    eventually(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    status = json.loads((tmp_path / "home" / "jobs" / "job" / "status.json").read_text())
    os.kill(status["pid"], signal.SIGKILL)
    eventually(lambda: processes.status("job").state == "lost")
    eventually(lambda: not alive(pids[0]))  # the job itself dies with its watcher
    assert processes.submit(JOB) is True  # and the rest goes before the job is created again
    assert not alive(pids[1])
    processes.stop("job", grace=0.2)
    assert processes.status("job").state == "exited"


def test_stop_of_a_lost_job_ends_what_it_left(launcher, tmp_path):
    processes = launcher("setsid sh -c 'echo $$ >> pids; sleep 600' & sleep 600")
    processes.submit(JOB)
    eventually(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().strip())
    os.kill(json.loads((tmp_path / "home/jobs/job/status.json").read_text())["pid"], signal.SIGKILL)
    processes.stop("job")
    assert not alive(int((tmp_path / "pids").read_text()))
    assert processes.status("job").exit_code == 137


def test_watcher_of_another_boot_is_not_a_running_job(launcher, tmp_path):
    """Process ids begin anew with each start of the host."""
    processes = launcher("sleep 5")
    processes.submit(JOB)
    path = tmp_path / "home" / "jobs" / "job" / "status.json"
    status = json.loads(path.read_text())
    assert processes.status("job").state == "running"
    path.write_text(json.dumps({**status, "boot": "another"}))
    assert processes.status("job").state == "lost"
    path.write_text(json.dumps({**status, "start": status["start"] + 1}))
    assert processes.status("job").state == "lost"
    path.write_text(json.dumps(status))
    processes.stop("job", grace=0.2)


def test_absent_job(launcher):
    processes = launcher("true")
    assert processes.status("job").state == "absent"
    assert processes.logs("job") == (b"", "")
    assert processes.failure_report("job") is None
    processes.stop("job")
    assert processes.status("job").state == "absent"


def test_failure_report_is_that_of_this_try(launcher):
    processes = launcher('if [ ! -e second ]; then echo report > "$DRAFTER_FAILURE_FILE"; touch second; fi; exit 1')
    processes.submit(JOB)
    ended(processes)
    assert processes.failure_report("job") == b"report\n"
    processes.submit(JOB)
    ended(processes)
    assert processes.failure_report("job") is None


def test_interpreter_that_cannot_be_started(launcher, tmp_path):
    processes = launcher("true")
    (tmp_path / "python").write_text("#!/no/such/interpreter\n")
    processes.submit(JOB)
    assert ended(processes) == 127
    assert b"cannot start" in processes.logs("job")[0]


def test_project_folder_that_is_gone(launcher, tmp_path):
    processes = launcher("true")
    processes.project = tmp_path / "gone"
    processes.submit(JOB)
    assert ended(processes) == 127
    assert b"gone" in processes.logs("job")[0]


def test_watcher_that_does_not_start_says_why(launcher, monkeypatch):
    processes = launcher("true")
    monkeypatch.setattr("operators.launchers.process.sys.executable", "/bin/false")
    with pytest.raises(LaunchError, match=r"job job: its watcher did not start \(exit code 1\)"):
        processes.submit(JOB)
    monkeypatch.undo()
    assert processes.submit(JOB) is True  # the half-made folder is in nobody's way
    assert ended(processes) == 0


def test_old_folders_go_and_new_ones_stay(launcher, tmp_path):
    processes = launcher("true")
    for name in ("old", "new"):
        processes.submit(Job(name, b"{}"))
        ended(processes, name)
    long_ago = time.time() - KEEP_SECONDS - 60
    os.utime(tmp_path / "home/jobs/old/exit.json", (long_ago, long_ago))
    processes.submit(JOB)
    ended(processes)
    assert processes.status("old").state == "absent"
    assert processes.status("new").succeeded


def test_environment_of_a_task():
    kept = {"AWS_SECRET_ACCESS_KEY": "s", "MLFLOW_TRACKING_URI": "u", "PATH": "p", "DRAFTER_STORE": "s3://b/p"}
    airflow = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "x",
        "AIRFLOW_CONN_S3": "x",
        "AIRFLOW_HOME": "x",
        "_AIRFLOW_WWW_USER_PASSWORD": "x",
        "FERNET_KEY": "x",
        "PYTHONPATH": "x",
        "VIRTUAL_ENV": "x",
    }
    assert task_environment({**kept, **airflow}) == kept
