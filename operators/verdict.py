"""From how a job ended to a result or an error: the same for every launcher.

Success is an exit code of 0 and a receipt in the store that is this task's. Nothing a job prints counts.
"""

from __future__ import annotations

import hashlib
import logging
import signal

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from operators.launchers.base import JobStatus, Launcher
from tasks.contract.errors import NEVER_RETRIED, FailureReport, IntegrityError, StageError
from tasks.contract.layout import failure_path, receipt_path
from tasks.contract.receipt import Receipt
from tasks.contract.request import StageRequest
from tasks.contract.stages import STAGES
from tasks.storage import open_store
from tasks.storage.artifact import find_receipt
from tasks.storage.base import Store

HASHED_BYTES = 4 << 20  # objects up to this size are read and hashed here; larger ones where they are used
_NAMES = {cls.exit_code: cls.__name__ for cls in StageError.__subclasses__() if cls.exit_code != StageError.exit_code}
_SIGNALS = {
    signal.SIGKILL: "killed: the host or container was out of memory, or somebody ended it",
    signal.SIGTERM: "ended by request",
    signal.SIGSEGV: "crashed in native code",
    signal.SIGABRT: "aborted in native code",
    signal.SIGBUS: "bus error: often a full /dev/shm",
}


class StageFailed(AirflowException):
    """A stage failed in a way that another try may not."""


class JobFailed(StageError):
    """A job that gave no result, with the report of why."""

    def __init__(self, report: FailureReport) -> None:
        self.report = report
        super().__init__(report.message)


def proven_receipt(store: Store, stage: str, key: str) -> Receipt | None:
    """The receipt of a stage's result if there is one, with its objects where and as it says.

    Raises:
        IntegrityError: if it is not of this stage, version and key, or an object is missing or different.
    """
    receipt = find_receipt(store, stage, key)
    if receipt is None:
        return None
    where = f"{store.root}: {receipt_path(stage, key)}"
    if (receipt.kind, receipt.key, receipt.version) != (stage, key, STAGES[stage].version):
        raise IntegrityError(
            f"{where} says {receipt.kind} version {receipt.version} key {receipt.key}; "
            f"expected {stage} version {STAGES[stage].version} key {key}"
        )
    for stored in receipt.objects:
        try:
            found = f"{store.stat(stored.path).size:,} bytes"
            damaged = found != f"{stored.size:,} bytes"
            if not damaged and stored.size <= HASHED_BYTES:
                digest = hashlib.sha256(store.read(stored.path)).hexdigest()
                found, damaged = f"SHA-256 {digest}", digest != stored.sha256
        except FileNotFoundError:
            found, damaged = "nothing", True
        if damaged:
            raise IntegrityError(
                f"{where}: object {stored.name} should have {stored.size:,} bytes and SHA-256 {stored.sha256}, found "
                f"{found} at {stored.path}; remove the receipt to have the result made again"
            )
    return receipt


def result_of(request: StageRequest, status: JobStatus, launcher: Launcher) -> Receipt:
    """The receipt of a job that ended well.

    Raises:
        JobFailed: with the job's own report, or one made from its exit code.
        IntegrityError: if the receipt is not this task's, or its objects are not what it says.
    """
    job, stage = request.run.job, request.stage
    # A job whose end nobody saw (host restarted, folder cleared by a second copy) may have finished all the same: the
    # receipt is written last, so it is the better witness.
    if status.succeeded or status.state in ("absent", "lost"):
        receipt = proven_receipt(open_store(request.store), stage, request.key())
        if receipt is not None:
            return receipt
    if status.succeeded:
        where = f"{receipt_path(stage, request.key())} in {request.store}"
        raise _failed(stage, "ReceiptMissing", f"job {job} ended with exit code 0 without a receipt; expected {where}")
    if status.state != "exited" or status.exit_code is None:
        raise _failed(stage, "JobLost", f"job {job} is {status.state}: {status.reason}")
    report = _report(request, status.exit_code, launcher)
    if report is not None:
        raise JobFailed(report)
    message = f"{_ended(status)}; it left no failure report, so the job's log above is all there is"
    raise _failed(stage, _NAMES.get(status.exit_code, "StageFailed"), message, status.exit_code)


def airflow_error(report: FailureReport) -> AirflowException:
    """What to raise in the Airflow task: `AirflowFailException`, which stops the retries, where they cannot help."""
    text = f"{report.stage}: {report.error}: {report.message}"
    final = report.exit_code in NEVER_RETRIED or not report.retryable
    return AirflowFailException(text) if final else StageFailed(text)


def _failed(stage: str, error: str, message: str, exit_code: int = 1) -> JobFailed:
    retryable = exit_code not in NEVER_RETRIED
    return JobFailed(FailureReport(stage=stage, error=error, message=message, exit_code=exit_code, retryable=retryable))


def framed(report: FailureReport) -> str:
    """The failure as a person reads it in the task log: one screen, no traceback."""
    again = "retried if tries are left" if report.retryable else "not retried: the same input fails the same way"
    title = f"{report.stage} failed: {report.error} (exit code {report.exit_code}, {again})"
    rule = "-" * min(100, max(40, len(title) + 2))
    lines = [f"  {line}" for line in report.message.splitlines()]
    fields = [f"  Field{'s' if len(report.fields) > 1 else ''}: {', '.join(report.fields)}"] if report.fields else []
    return "\n".join([rule, f"  {title}", rule, *lines, *fields, rule])


def _report(request: StageRequest, exit_code: int, launcher: Launcher) -> FailureReport | None:
    """The failure report of this very try: the local copy, else the store's if it is about this exit code."""
    local = launcher.failure_report(request.run.job)
    data = local
    if data is None:
        try:
            data = open_store(request.store).read(failure_path(request.run.run_id, request.run.job))
        except FileNotFoundError:
            return None
        except StageError as error:
            logging.getLogger(__name__).warning("The failure report cannot be read: %s", error)
            return None
    try:
        report = FailureReport.model_validate_json(data)
    except ValueError as error:
        logging.getLogger(__name__).warning("The failure report of %s is unreadable: %s", request.run.job, error)
        return None
    # An earlier try's report must not explain this one's end (killed, say).
    return report if report.exit_code == exit_code else None


def _ended(status: JobStatus) -> str:
    code = status.exit_code or 0
    if code <= 128:
        return f"exit code {code}" + (f" ({status.reason})" if status.reason else "")
    number = code - 128
    try:
        name = signal.Signals(number).name
        meaning = _SIGNALS.get(signal.Signals(number), "ended by a signal")
    except ValueError:
        name, meaning = f"signal {number}", "ended by a signal"
    return f"exit code {code} ({name}; {meaning})"
