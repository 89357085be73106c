"""Starting, stopping and looking at all embedded services together."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from operators.embedded import services as services_module
from operators.embedded.errors import EmbeddedError, ServiceFailed
from operators.embedded.processes import (
    ProcessStat,
    Record,
    end,
    last_lines,
    launch,
    owned,
    read_records,
    reap,
    running_processes,
)
from operators.embedded.services import MIGRATION, S3, Service, all_services, require_installed
from operators.embedded.settings import Home, Settings

Say = Callable[[str], None]
START_SECONDS = 240.0
STOP_SECONDS = 15.0
# SeaweedFS closes its streams for 15 s before it ends by itself; its data are on disk by then.
S3_STOP_SECONDS = 25.0
_OURS = (
    "airflow",
    "mlflow",
    "s3",
    "logs",
    "processes",
    "jobs",
    "run",
    "credentials.json",
    "ports.json",
    "s3.json",
    "lock",
)


@contextlib.contextmanager
def _locked(home: Home) -> Iterator[None]:
    """One command at a time works on a state folder."""
    with (home.path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EmbeddedError(
                f"another command is starting or stopping the services of {home.path}; wait for it"
            ) from None
        yield


# ---- start ----------------------------------------------------------------------------------------------------------


def up(environment: Mapping[str, str], say: Say = print) -> Settings:
    """Start what does not run yet, and wait until all of it works.

    Args:
        environment: the caller's; DRAFTER_* variables in it choose ports, folders and sizes (see the README).
        say: gets one line per service.

    Raises:
        PortTaken: a port that the caller named is held by another process.
        ServiceFailed: a service ended or did not become healthy; what this call started has been stopped again.
    """
    home = Home.of(environment)
    home.create()
    with _locked(home):
        settings = Settings.load(environment)
        require_installed(settings)
        settings.write_files()
        start = _Start(settings, say)
        try:
            start.run()
        except BaseException:
            _stop_services(home, set(start.launched))
            raise
    return settings


class _Start:
    """One walk over the services: each starts when those it needs are healthy."""

    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings, self._say = settings, say
        self._waiting = {service.name: service for service in all_services(settings)}
        self._starting: dict[str, Service] = {}
        self._healthy: set[str] = set()
        self._records = read_records(settings.home.records)
        self._reasons: dict[str, str] = {}
        self.launched: list[str] = []

    def run(self) -> None:
        self._stop_outdated()
        deadline = time.monotonic() + START_SECONDS
        while self._waiting or self._starting:
            for service in [s for s in self._waiting.values() if self._healthy.issuperset(s.after)]:
                self._begin(self._waiting.pop(service.name))
            for service in list(self._starting.values()):
                self._look(service)
            if self._starting and time.monotonic() > deadline:
                self._give_up()
            if self._starting:
                time.sleep(0.5)

    def _stop_outdated(self) -> None:
        """A service that runs with other settings than the present ones starts again."""
        outdated = {
            name
            for name, service in self._waiting.items()
            if name in self._records
            and self._records[name].leader()
            and self._records[name].fingerprint != service.fingerprint()
        }
        for name in sorted(outdated):
            self._say(f"{self._waiting[name].title}: settings have changed, starting it again")
        _stop_services(self._settings.home, outdated)

    def _begin(self, service: Service) -> None:
        record = self._records.get(service.name)
        if record is not None and record.leader():
            self._starting[service.name] = service
            return
        if service.once and service.check(0.0) is None:
            self._healthy.add(service.name)
            return
        _stop_services(self._settings.home, {service.name})  # children of one that died
        self._records[service.name] = launch(
            service.name,
            service.command,
            self._settings.process_environment(service.environment),
            cwd=self._settings.home.path / "run" / service.name,
            log=self._settings.home.logs / f"{service.name}.log",
            folder=self._settings.home.records,
            fingerprint=service.fingerprint(),
        )
        self.launched.append(service.name)
        self._starting[service.name] = service

    def _look(self, service: Service) -> None:
        record = self._records[service.name]
        if record.leader() is None and not (service.once and reap(record.pid) == 0):
            raise ServiceFailed(_death(service, record))
        if service.once:
            if record.leader() is not None:
                return
        else:
            reason = service.check(record.started_at)
            if reason is not None:
                self._reasons[service.name] = reason
                return
        service.prepare()
        del self._starting[service.name]
        self._healthy.add(service.name)
        seconds = time.time() - record.started_at
        how = f"ready after {seconds:.0f} s" if service.name in self.launched else "running already"
        address = f"  {service.address}" if service.address else ""
        self._say(f"{service.title:<22} {how}{address}")

    def _give_up(self) -> None:
        texts = [
            f"{service.title} is not healthy after {START_SECONDS:.0f} s: "
            f"{self._reasons.get(name, 'it has not ended')}\n"
            f"  last lines of {self._records[name].log}:\n{last_lines(Path(self._records[name].log))}"
            for name, service in self._starting.items()
        ]
        raise ServiceFailed("\n".join(texts))


def _death(service: Service, record: Record) -> str:
    status = reap(record.pid)
    how = "" if status is None else f" with exit status {status}" if status >= 0 else f" by signal {-status}"
    return (
        f"{service.title} ended{how} while starting (process {record.pid})\n"
        f"  last lines of {record.log}:\n{last_lines(Path(record.log))}"
    )


# ---- stop -----------------------------------------------------------------------------------------------------------


def stop(
    environment: Mapping[str, str], *, grace_seconds: float = STOP_SECONDS, s3_grace_seconds: float = S3_STOP_SECONDS
) -> int:
    """End everything that was started from this state folder, and nothing else.

    Stages and Airflow first, the store last: what is interrupted may still write its checkpoint.

    Returns:
        The number of processes ended.
    """
    home = Home.of(environment)
    if home.read_credentials() is None:
        return 0
    with _locked(home):
        return _stop_all(home, grace_seconds, s3_grace_seconds)


def _stop_all(home: Home, grace_seconds: float, s3_grace_seconds: float) -> int:
    records = read_records(home.records)
    store = {S3} & set(records)

    def all_but_store() -> dict[int, ProcessStat]:
        kept = _session(records[S3]) if store else set()
        return {pid: stat for pid, stat in home.processes().items() if pid not in kept}

    count = end(all_but_store, grace_seconds)
    count += end(home.processes, s3_grace_seconds)
    if store:
        services_module.remove_s3_sockets(json.loads(home.ports_file.read_text()))
    for name in records:
        (home.records / f"{name}.json").unlink(missing_ok=True)
    return count


def _session(record: Record) -> set[int]:
    """Pids in the session of a recorded process that runs."""
    if record.leader() is None:
        return set()
    return {pid for pid, stat in running_processes().items() if stat.session == record.pid}


def _stop_services(home: Home, names: set[str]) -> None:
    """End some services and all below them; others are left alone."""
    records = {name: record for name, record in read_records(home.records).items() if name in names}
    if not records:
        return
    grace = S3_STOP_SECONDS if S3 in records else STOP_SECONDS
    # No marker: it stands in the environment of the services that stay, too.
    end(lambda: owned(records.values(), "none of them", home.path), grace)
    for name in records:
        (home.records / f"{name}.json").unlink(missing_ok=True)


def clean(environment: Mapping[str, str]) -> bool:
    """Stop everything and remove the state folder, with data, databases and logs. Other files in it are kept.

    Returns:
        Whether there was anything to remove.

    Raises:
        EmbeddedError: if the folder is not one of ours.
    """
    home = Home.of(environment)
    if not home.path.exists():
        return False
    if home.read_credentials() is None and any(home.path.iterdir()):
        raise EmbeddedError(
            f"{home.path} holds files but no credentials.json: it is not a state folder of these services; "
            "nothing was removed"
        )
    if home.read_credentials() is not None:
        with _locked(home):
            _stop_all(home, grace_seconds=5.0, s3_grace_seconds=0.0)  # its data are removed next
    if home.is_created_by_us():
        shutil.rmtree(home.path)
        return True
    for name in _OURS:
        path = home.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else's files are in it
        home.path.rmdir()
    return True


# ---- status ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServiceStatus:
    """What `status` shows of one service."""

    title: str
    state: str  # healthy, unhealthy, dead, stopped
    pid: int | None = None
    address: str | None = None
    reason: str | None = None
    log: str | None = None


def status(environment: Mapping[str, str]) -> list[ServiceStatus]:
    """State of each service; changes nothing. Empty if nothing was ever started here."""
    home = Home.of(environment)
    if home.read_credentials() is None or not home.ports_file.exists():
        return []
    settings = Settings.recorded(environment)
    records = read_records(home.records)
    return [
        _status(service, records.get(service.name))
        for service in services_module.all_services(settings)
        if service.name != MIGRATION
    ]


def _status(service: Service, record: Record | None) -> ServiceStatus:
    if record is None:
        return ServiceStatus(service.title, "stopped")
    if record.leader() is None:
        return ServiceStatus(service.title, "dead", log=record.log, reason="its process has ended")
    reason = service.check(record.started_at)
    state = "healthy" if reason is None else "unhealthy"
    return ServiceStatus(service.title, state, record.pid, service.address, reason, record.log)
