"""What every launcher does: start a job once, tell how it is, pass its log on, end it.

A job is one stage in one container (or process). Its name is a function of the task and of what it works on, without
the try number: whoever submits the same name while the job runs gets that very job ("create, on conflict adopt").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tasks.contract.errors import StageError

LOG_END = "end"  # cursor of `Launcher.logs`: begin shortly before the end, not at the start


class LaunchError(StageError):
    """The backend did not start the job. Another try may."""


@dataclass(frozen=True)
class Job:
    """One stage to run."""

    name: str  # lower-case letters, digits, hyphens; at most 63
    request: bytes  # StageRequest as JSON
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)  # dag, run, task, map index, try: for people


@dataclass(frozen=True)
class JobStatus:
    """How a job is.

    `absent`: there is no job of that name. `running`: it is, or will be. `exited`: it ended, with `exit_code`
    (128 + n after signal n). `lost`: it is gone and nothing says how it ended.
    """

    state: Literal["absent", "running", "exited", "lost"]
    exit_code: int | None = None
    reason: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether it ended with exit code 0."""
        return self.state == "exited" and self.exit_code == 0

    def __str__(self) -> str:
        return f"exited {self.exit_code}" if self.state == "exited" else self.state


class Launcher(Protocol):
    """Where jobs run."""

    name: str

    def submit(self, job: Job) -> bool:
        """Start the job unless it is running. True: a new one was started; False: the running one was adopted.

        An ended holder of the name is removed and created again. Safe against a second submitter at the same moment.

        Raises:
            LaunchError: if the backend did not start it.
            ConfigurationError: if the deployment cannot start any.
        """

    def status(self, name: str) -> JobStatus:
        """How the job is."""

    def logs(self, name: str, cursor: str = "") -> tuple[bytes, str]:
        """What the job printed since `cursor` ("" = the start), at most about 1 MiB, and the next cursor.
        Empty when there is nothing new."""

    def stop(self, name: str, grace: float = 3.0) -> None:
        """SIGTERM, after `grace` seconds SIGKILL, to everything the job started. Returns when nothing is left."""

    def failure_report(self, name: str) -> bytes | None:
        """The job's local copy of its `FailureReport`, for when the store is down. None if it left none."""
