"""Local processes: started in a session of their own, recorded with their start time, ended with everything below them.

A pid alone says nothing once its process has ended: the kernel gives the number to somebody else. So a process is
identified by pid, start time (clock ticks since boot, field 22 of /proc/PID/stat) and boot id, and signals go through
a pidfd that is checked against the start time. Needs Linux 5.3 or newer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from operators.embedded.errors import StopFailed

MARKER = "DRAFTER_INSTANCE"  # in the environment of everything that one set of services starts
_GONE = "ZX"  # states of a process that has ended: zombie, dead
_KILL_SECONDS = 10.0
_statuses: dict[int, int] = {}  # exit statuses of children of this process, by pid


@dataclass(frozen=True)
class ProcessStat:
    """What /proc says of one process."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int


def read_stat(pid: int) -> ProcessStat | None:
    """State of a process, None if there is none of that pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    before, _, after = text.rpartition(")")  # the name may hold blanks and parentheses
    fields = after.split()
    return ProcessStat(
        pid=pid,
        name=before.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def running_processes() -> dict[int, ProcessStat]:
    """All processes that have not ended, by pid."""
    stats = (read_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {stat.pid: stat for stat in stats if stat is not None and stat.state not in _GONE}


def boot_id() -> str:
    """Changes at every boot, after which recorded pids and start times mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Record:
    """One started process, as kept in `<home>/processes/<name>.json`. Holds no secret."""

    name: str
    pid: int
    start_ticks: int
    boot_id: str
    command: list[str]
    fingerprint: str  # digest of command and settings: a different one means that the service must start again
    log: str
    started_at: float  # seconds since the epoch

    def leader(self) -> ProcessStat | None:
        """The very process that was started, or None if it has ended."""
        if self.boot_id != boot_id():
            return None
        reap(self.pid)
        stat = read_stat(self.pid)
        if stat is None or stat.state in _GONE or stat.start_ticks != self.start_ticks:
            return None
        return stat

    def save(self, folder: Path) -> None:
        """Write whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{self.name}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(folder / f"{self.name}.json")


def read_records(folder: Path) -> dict[str, Record]:
    """Recorded processes by name."""
    found = [Record(**json.loads(path.read_text())) for path in sorted(folder.glob("[!.]*.json"))]
    return {record.name: record for record in found}


def reap(pid: int) -> int | None:
    """Exit status (as of `subprocess`) of a child of ours that has ended; None if it runs or was not our child."""
    with contextlib.suppress(ChildProcessError):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _statuses[pid] = os.waitstatus_to_exitcode(status)
    return _statuses.get(pid)


def launch(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    cwd: Path,
    log: Path,
    folder: Path,
    fingerprint: str,
) -> Record:
    """Start a process in a session of its own and record it.

    Args:
        log: gets stdout and stderr; an earlier file is kept as `<log>.previous`.
        folder: of the records.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    cwd.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(log.name + ".previous"))
    with log.open("wb") as output:
        process = _spawn(command, environment, cwd, output)
    _statuses.pop(process.pid, None)
    stat = read_stat(process.pid)
    if stat is None:  # impossible before it is waited for: an ended child stays as a zombie
        raise RuntimeError(f"{name}: process {process.pid} is not in /proc")
    record = Record(name, process.pid, stat.start_ticks, boot_id(), list(command), fingerprint, str(log), time.time())
    record.save(folder)
    return record


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, output: IO[bytes]
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    process.returncode = 0  # it outlives us by design: no "still running" warning; `reap` waits for it
    return process


def owned(records: Iterable[Record], marker: str, home: Path) -> dict[int, ProcessStat]:
    """Every running process that the recorded ones brought about, themselves included, by pid.

    Ours is: a member of a recorded session; what carries our random marker in its environment (stage processes have
    sessions of their own); a member of the session of a recorded process that has ended, if it works inside `home`
    (Airflow's workers overwrite their environment); and every descendant of these. Never this process or its ancestors.
    """
    processes = running_processes()
    recorded = [record for record in records if record.boot_id == boot_id()]
    leaders = {record.pid for record in recorded if record.leader()}
    orphaned = {record.pid for record in recorded} - leaders - set(processes)
    token = f"{MARKER}={marker}".encode()
    ours = {
        pid
        for pid, stat in processes.items()
        if stat.session in leaders
        or token in _environment(pid)
        or (stat.session in orphaned and _works_inside(pid, home))
    }
    grew = True
    while grew:
        children = {pid for pid, stat in processes.items() if stat.parent in ours} - ours
        ours |= children
        grew = bool(children)
    return {pid: processes[pid] for pid in ours - _ancestors(processes)}


def _ancestors(processes: Mapping[int, ProcessStat]) -> set[int]:
    found, pid = set(), os.getpid()
    while pid and pid not in found:
        found.add(pid)
        pid = processes[pid].parent if pid in processes else 0
    return found


def _environment(pid: int) -> list[bytes]:
    """Environment the process was started with; empty if it is another user's, or gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _works_inside(pid: int, home: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(home.resolve())
    except OSError:
        return False


def send(stat: ProcessStat, signum: signal.Signals) -> bool:
    """Signal exactly this process. False if it has ended, whoever has its number now."""
    try:
        descriptor = os.pidfd_open(stat.pid)
    except ProcessLookupError:
        return False
    try:
        now = read_stat(stat.pid)
        if now is None or now.start_ticks != stat.start_ticks:
            return False
        signal.pidfd_send_signal(descriptor, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def end(find: Callable[[], Mapping[int, ProcessStat]], grace_seconds: float) -> int:
    """SIGTERM each process that `find` names, wait, then SIGKILL what is left, until `find` names none.

    `find` is asked again and again, so children born meanwhile are ended too.

    Returns:
        How many processes were ended.

    Raises:
        StopFailed: naming those that survive SIGKILL.
    """
    asked: set[tuple[int, int]] = set()
    deadline = time.monotonic() + grace_seconds
    while members := find():
        late = time.monotonic() - deadline
        if late > _KILL_SECONDS:
            names = ", ".join(f"{stat.pid} ({stat.name})" for stat in members.values())
            raise StopFailed(f"processes that survive SIGKILL for {_KILL_SECONDS:.0f} s: {names}")
        for stat in members.values():
            if late >= 0:
                send(stat, signal.SIGKILL)
            elif (stat.pid, stat.start_ticks) not in asked:
                send(stat, signal.SIGTERM)
            asked.add((stat.pid, stat.start_ticks))
        time.sleep(0.1)
        for pid, _ in asked:
            reap(pid)
    return len(asked)


def last_lines(log: Path, count: int = 15) -> str:
    """End of a log file, for an error message."""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 16_384))
        lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-count:])
    return ""
