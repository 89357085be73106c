"""Errors a stage can end with, their exit codes, and the failure report they leave.

The exit code is the only thing a container engine passes on, so each class has its own; `operators` turns it back
into "retry" or "do not retry". The text goes through the failure report, a small JSON object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel


class StageError(Exception):
    """A stage cannot give its result. Subclasses say whether another try can help."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = True


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a run specification."""

    field: str
    found: object
    expected: str

    def __str__(self) -> str:
        return f"{self.field}: found {self.found!r}; expected {self.expected}"


class ConfigurationError(StageError):
    """The run specification or the deployment is wrong. Never retried: the same input fails the same way."""

    exit_code = 64
    retryable = False

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(StageError):
    """The input data cannot make a training set (empty, unreadable, nothing supervised). Never retried."""

    exit_code = 65
    retryable = False


class IntegrityError(StageError):
    """Stored bytes or values are not what their receipt or the target says. Never retried as is."""

    exit_code = 66
    retryable = False


class TrainingDiverged(StageError):
    """Loss or gradient norm is not finite. Never retried as is."""

    exit_code = 67
    retryable = False


class DecodingMismatch(StageError):
    """Speculative decoding did not reproduce plain greedy decoding. Never retried."""

    exit_code = 68
    retryable = False


class DeviceUnavailable(StageError):
    """No GPU where one is asked for, or it was lost in mid-run."""

    exit_code = 69


class StorageError(StageError):
    """The artifact store did not answer, or refused."""

    exit_code = 74


class Interrupted(StageError):
    """SIGTERM reached the stage; what it had finished is in the store."""

    exit_code = 75


_CLASSES = (
    ConfigurationError,
    DataError,
    IntegrityError,
    TrainingDiverged,
    DecodingMismatch,
    DeviceUnavailable,
    StorageError,
    Interrupted,
)
NEVER_RETRIED: dict[int, str] = {cls.exit_code: cls.__name__ for cls in _CLASSES if not cls.retryable}


class FailureReport(BaseModel):
    """What a failed stage leaves beside its logs, so that a person reads one screen and not a traceback."""

    schema_version: int = 1
    stage: str
    error: str
    message: str
    exit_code: int
    retryable: bool
    fields: list[str] = []

    @classmethod
    def of(cls, stage: str, error: BaseException) -> FailureReport:
        """The report of an error; an error that is not a `StageError` is a defect of ours and may be retried."""
        if isinstance(error, StageError):
            fields = [p.field for p in error.problems] if isinstance(error, ConfigurationError) else []
            code, retryable = error.exit_code, error.retryable
        else:
            fields, code, retryable = [], 1, True
        return cls(
            stage=stage,
            error=type(error).__name__,
            message=str(error) or type(error).__name__,
            exit_code=code,
            retryable=retryable,
            fields=fields,
        )
