"""Watches over one job as its parent, in a session of its own, so that the job outlives whoever submitted it.

    python process_shim.py JOB_FOLDER

Standard library only, Linux only. Returns at once; the watcher goes on in the background. In the job folder it reads
`job.json` (argv, cwd, grace) and writes `status.json` (who watches what), `log` (standard output and error, as bytes)
and, last, `exit.json`. All descendants of the job are reparented to the watcher (subreaper) and are ended with it:
after `exit.json` nothing the job started is alive. SIGTERM to the watcher ends the job: SIGTERM, grace, SIGKILL.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_WATCHED = {signal.SIGCHLD, signal.SIGTERM}
_KILL_SECONDS = 10.0


def boot_id() -> str:
    """Changes with every start of the host: process start times count from it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_stat(pid: int) -> tuple[str, int, int] | None:
    """State letter, parent and start time (clock ticks since boot) of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    return values[0], int(values[1]), int(values[19])


def descendants(root: int) -> list[int]:
    """Every process below `root`, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := process_stat(int(entry))):
            children.setdefault(stat[1], []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value))
    os.replace(partial, path)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _in_child() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the watcher itself is killed the job does not run on unseen


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended in between, which is what was wanted


def _reap(child: int) -> int | None:
    """Collect whatever has ended; the job's own exit code if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code


def _end_descendants() -> list[int]:
    """SIGKILL until nothing is left, however fast it forks. Returns what could not be ended."""
    deadline = time.monotonic() + _KILL_SECONDS
    while left := descendants(os.getpid()):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            _send(pid, signal.SIGKILL)
        _reap(-1)
        time.sleep(0.01)
    return []


def _wait(child: int, grace: float) -> tuple[int, bool]:
    """Wait for the job. Exit code, and whether it was asked to stop."""
    deadline: float | None = None
    while True:
        left = 1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic()))
        info = signal.sigtimedwait(_WATCHED, left)
        if info is not None and info.si_signo == signal.SIGTERM and deadline is None:
            _send(child, signal.SIGTERM)
            deadline = time.monotonic() + grace
        code = _reap(child)
        if code is not None:
            return code, deadline is not None
        if deadline is not None and time.monotonic() >= deadline:
            _send(child, signal.SIGKILL)
            deadline = time.monotonic() + 0.2


def _watch(folder: Path, ready: int) -> None:
    os.setsid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job = json.loads((folder / "job.json").read_text())
    stat = process_stat(os.getpid())
    assert stat is not None  # our own
    status: dict[str, Any] = {"pid": os.getpid(), "start": stat[2], "boot": boot_id(), "started_at": time.time()}
    with (folder / "log").open("ab", buffering=0) as log:
        try:
            child = subprocess.Popen(
                job["argv"],
                cwd=job["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_in_child,  # safe: this process has one thread
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.write(f"cannot start {job['argv'][0]} in {job['cwd']}: {error}\n".encode())
            write_json(folder / "status.json", status)
            write_json(folder / "exit.json", {"exit_code": 127, "reason": str(error), "ended_at": time.time()})
            os.write(ready, b"1")
            return
    write_json(folder / "status.json", {**status, "child": child.pid, "pgid": child.pid})
    os.write(ready, b"1")
    os.close(ready)
    code, stopped = _wait(child.pid, float(job["grace"]))
    left = _end_descendants()
    write_json(folder / "exit.json", {"exit_code": code, "stopped": stopped, "left": left, "ended_at": time.time()})


def main(folder: Path) -> int:
    """Fork the watcher; return once the job is on record. 1 if the watcher could not get that far."""
    receive, ready = os.pipe()
    if os.fork():
        os.close(ready)
        return 0 if os.read(receive, 1) else 1
    try:
        os.close(receive)
        _watch(folder, ready)
    except BaseException:
        traceback.print_exc()  # standard error is a file in the job folder
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
