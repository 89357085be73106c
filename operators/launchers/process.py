"""Jobs as local processes: the launcher that needs nothing installed.

Job folder `$DRAFTER_HOME/jobs/<name>/`: request.json, job.json, status.json, log, exit.json and, from a failed stage,
failure.json. A watcher process (`process_shim`) is the parent of the job and outlives the Airflow task that submitted
it. Submitters and readers of one name take turns by `flock` on `$DRAFTER_HOME/jobs/<name>.lock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from operators.launchers import process_shim
from operators.launchers.base import LOG_END, Job, JobStatus, LaunchError
from tasks.contract.errors import ConfigurationError, Problem

log = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parents[2]
CHUNK = 1 << 20  # bytes of log passed on at a time
TAIL = 1 << 16  # bytes of log shown of what an adopted job printed before
KEEP_SECONDS = 7 * 86400  # ended jobs' folders
GRACE_SECONDS = 3.0  # Airflow itself sends SIGKILL to a task 5 s after SIGTERM
_START_SECONDS = 60.0
_TOKEN = "DRAFTER_JOB_TOKEN"  # marks every process of one job: the environment is inherited
_AIRFLOW_ONLY = ("AIRFLOW", "_AIRFLOW", "__AIRFLOW")
_OF_THIS_INTERPRETER = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def task_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a stage inherits: everything but Airflow's settings and secrets (`AIRFLOW*`: connections, keys, database
    address) and what belongs to Airflow's own Python environment."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_AIRFLOW_ONLY) and "FERNET" not in name and name not in _OF_THIS_INTERPRETER
    }


class ProcessLauncher:
    """Runs `<tasks python> -m tasks run --request FILE` in the project folder.

    Linux only (`/proc`, subreaper). It does not limit memory or pick GPUs.
    """

    name = "process"

    def __init__(self, home: Path, python: str, project: Path = PROJECT) -> None:
        self.jobs = home / "jobs"
        self.python = python
        self.project = project

    @classmethod
    def from_environment(cls) -> ProcessLauncher:
        """Configured by `DRAFTER_HOME` and `DRAFTER_TASKS_PYTHON`.

        Raises:
            ConfigurationError: naming the variable that is missing or wrong.
        """
        home, python = os.environ.get("DRAFTER_HOME"), os.environ.get("DRAFTER_TASKS_PYTHON")
        problems = []
        if not home:
            problems.append(Problem("DRAFTER_HOME", home, "a writable folder for jobs and their logs"))
        if not python or shutil.which(python) is None:
            problems.append(Problem("DRAFTER_TASKS_PYTHON", python, "the Python interpreter of the tasks environment"))
        if problems or not home or not python:
            raise ConfigurationError(problems)
        return cls(Path(home).resolve(), python)

    # ---- Launcher ---------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> bool:
        """Start the job unless it is running. True: a new one was started; False: the running one was adopted."""
        with self._lock(job.name):
            status = self._status(job.name)
            if status.state == "running":
                return False
            folder = self.jobs / job.name
            if folder.exists():
                self._end_marked(folder)
                shutil.rmtree(folder)
            self._prune()
            self._start(job, folder)
        return True

    def status(self, name: str) -> JobStatus:
        """How the job is; waits while somebody is just creating it."""
        with self._lock(name):
            return self._status(name)

    def logs(self, name: str, cursor: str = "") -> tuple[bytes, str]:
        """What was written to the log since `cursor`, a position in the file."""
        path = self.jobs / name / "log"
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                position = max(0, size - TAIL) if cursor == LOG_END else int(cursor or 0)
                if position > size:  # the job was created again under our feet
                    position = 0
                file.seek(position)
                data = file.read(CHUNK)
                return data, str(position + len(data))
        except FileNotFoundError:
            return b"", cursor

    def stop(self, name: str, grace: float = GRACE_SECONDS) -> None:
        """End the job and all it started. The watcher's own grace is `GRACE_SECONDS`; a shorter one cuts it off."""
        folder = self.jobs / name
        status = self._status(name)
        if status.state == "running":
            with contextlib.suppress(ProcessLookupError):
                os.kill(_read(folder / "status.json")["pid"], signal.SIGTERM)
            deadline = time.monotonic() + grace + 1.0
            while self._status(name).state == "running" and time.monotonic() < deadline:
                time.sleep(0.05)
        if folder.exists():
            self._end_marked(folder)
        if self._status(name).state in ("running", "lost"):
            reason = "ended by force: the watcher did not answer"
            process_shim.write_json(folder / "exit.json", {"exit_code": 137, "reason": reason, "stopped": True})

    def failure_report(self, name: str) -> bytes | None:
        """`failure.json` of the job folder."""
        with contextlib.suppress(FileNotFoundError):
            return (self.jobs / name / "failure.json").read_bytes()
        return None

    # ---- inside -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        self.jobs.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.jobs / f"{name}.lock").open("ab") as file:  # kept: removing it would split the lock in two
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _start(self, job: Job, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        token = secrets.token_hex(8)
        (folder / "request.json").write_bytes(job.request)
        process_shim.write_json(
            folder / "job.json",
            {
                "argv": [self.python, "-m", "tasks", "run", "--request", str(folder / "request.json")],
                "cwd": str(self.project),
                "grace": GRACE_SECONDS,
                "token": token,
                "labels": dict(job.labels),
            },
        )
        environment = {
            **task_environment(os.environ),
            _TOKEN: token,
            "DRAFTER_FAILURE_FILE": str(folder / "failure.json"),
            "PYTHONUNBUFFERED": "1",
        }
        with (folder / "shim.log").open("wb") as errors:
            started = subprocess.run(
                [sys.executable, str(Path(process_shim.__file__)), str(folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                timeout=_START_SECONDS,
                check=False,
            )
        if started.returncode != 0:
            said = (folder / "shim.log").read_text(errors="replace").strip()
            raise LaunchError(f"job {job.name}: its watcher did not start (exit code {started.returncode}): {said}")

    def _status(self, name: str) -> JobStatus:
        folder = self.jobs / name
        watcher = _read(folder / "status.json")
        alive = bool(watcher) and _is_alive(watcher)  # looked at before exit.json, which a watcher writes last
        if ended := _read(folder / "exit.json"):
            return JobStatus("exited", int(ended["exit_code"]), str(ended.get("reason", "")))
        if alive:
            return JobStatus("running")
        if not folder.exists():
            return JobStatus("absent", reason="there is no such job on this host")
        return JobStatus("lost", reason="its watcher is gone without a word (killed, or the host restarted)")

    def _end_marked(self, folder: Path) -> None:
        """SIGKILL whatever still carries the job's token: what outlived a watcher that was itself killed."""
        token = _read(folder / "job.json").get("token")
        if not token:
            return
        deadline = time.monotonic() + 5.0
        while pids := _marked(f"{_TOKEN}={token}".encode()):
            if time.monotonic() > deadline:
                raise LaunchError(f"job {folder.name}: processes {pids} of it do not end")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _prune(self) -> None:
        """Remove the folders of jobs that ended long ago."""
        for ended in self.jobs.glob("*/exit.json"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - ended.stat().st_mtime > KEEP_SECONDS:
                    shutil.rmtree(ended.parent)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}


def _is_alive(watcher: Mapping[str, Any]) -> bool:
    if watcher["boot"] != process_shim.boot_id():
        return False
    stat = process_shim.process_stat(int(watcher["pid"]))
    return stat is not None and stat[0] not in "ZX" and stat[2] == watcher["start"]


def _marked(entry: bytes) -> list[int]:
    """Processes of this user, zombies aside, whose environment holds `entry`."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended in between, or another user's
            if entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                stat = process_shim.process_stat(int(name))
                if stat is not None and stat[0] not in "ZX":
                    found.append(int(name))
    return found
