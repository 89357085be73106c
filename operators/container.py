"""The operator that runs one stage of the pipeline as a job and hands its receipt on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperator, BaseOperatorLink, ResumableJobMixin
from airflow.sdk.configuration import conf

from operators.joblog import JobLog
from operators.launchers import get_launcher
from operators.launchers.base import LOG_END, Job, Launcher
from operators.links import MlflowRunLink, ReceiptLink, mlflow_run_url
from operators.outage import airflow_answers
from operators.results import collect_inputs, refs_of, task_result
from operators.verdict import JobFailed, StageFailed, airflow_error, framed, proven_receipt, result_of
from tasks.contract.errors import ConfigurationError, FailureReport, Problem, StageError
from tasks.contract.presets import spec_from_form
from tasks.contract.receipt import Receipt
from tasks.contract.request import RunContext, StageRequest
from tasks.contract.spec import RunSpec
from tasks.contract.stages import STAGES
from tasks.storage import open_store
from tasks.storage.artifact import read_receipt

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context
    from pydantic import JsonValue

FIRST_POLL_SECONDS = 0.1
LAST_POLL_SECONDS = 0.5
STOP_GRACE_SECONDS = 3.0  # Airflow sends SIGKILL 5 s after SIGTERM


class ContainerTaskOperator(ResumableJobMixin, BaseOperator):
    """Run one stage as a job and return its receipt's reference.

    A result that is in the store already is returned without starting anything. A job that is still running when a
    worker died is adopted by the next try. The verdict is the exit code plus the receipt in the store; nothing that a
    job prints is a result. Errors that the same input would meet again are not retried.

    What it does not do: choose hyperparameters, read data, pick a GPU (the job does), know what a stage does.

    :param stage: name in ``tasks.contract.stages.STAGES``.
    :param inputs: results of earlier stages by input name: XComArgs, sequences of them, lazy sequences.
    :param group: further results, each filed under its own kind: what a mapped task gets besides ``inputs``.
    :param args: semantic arguments of the stage; they are part of the result's key.
    :param plan: result of the ``plan`` stage; ``None`` for that stage itself, which takes the Dag run's parameters.
    :param plan_args: further arguments taken from the plan's details, as argument name to detail name.
    :param expect: inputs that must have as many results as this sequence has items: ``{"extract": groups}``.
    :param gpus: GPUs of the job; ``None``: as the stage and the spec say.
    :param launcher: name of a launcher; ``None``: the deployment's.
    """

    # Renaming it breaks retries that are in flight.
    external_id_key = "drafter_job"

    template_fields: Sequence[str] = ("inputs", "group", "args", "plan", "expect")
    operator_extra_links: tuple[BaseOperatorLink, ...] = (MlflowRunLink(), ReceiptLink())
    ui_color = "#e8f0fe"

    def __init__(
        self,
        *,
        stage: str,
        inputs: Mapping[str, Any] | None = None,
        group: Any = None,
        args: Mapping[str, Any] | None = None,
        plan: Any = None,
        plan_args: Mapping[str, str] | None = None,
        expect: Mapping[str, Any] | None = None,
        gpus: int | None = None,
        launcher: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.stage = stage
        self.inputs = inputs
        self.group = group
        self.args = args
        self.plan = plan
        self.plan_args = plan_args
        self.expect = expect
        self.gpus = gpus
        self.launcher = launcher
        self.mlflow_url = ""
        self.receipt_address = ""

    # ---- Airflow ----------------------------------------------------------------------------------------------------

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the stage, adopt its running job, or find its result.

        Raises:
            AirflowFailException: for an error that another try would meet again.
            StageFailed: for any other.
        """
        self._stopped = self._leave = False
        self._launcher: Launcher | None = None
        self._receipt: Receipt | None = None
        self._adopted = True
        try:
            return self._run(context)
        except StageError as error:
            report = error.report if isinstance(error, JobFailed) else FailureReport.of(self.stage, error)
            self.log.error("%s", framed(report))
            raise airflow_error(report) from error

    def on_kill(self) -> None:
        """End the job, within five seconds; but leave it to the next try if Airflow itself is what is gone.

        `execute` is not unwound by this: its loop looks at the flags. Runs in a signal handler, so it logs nothing.
        """
        self._stopped = True
        if getattr(self, "_launcher", None) is not None and self._launcher is not None:
            self._leave = not airflow_answers()
            if not self._leave:
                self._launcher.stop(self._request.run.job, grace=STOP_GRACE_SECONDS)

    def _run(self, context: Context) -> dict[str, Any]:
        self._request = request = self._build_request(context)
        self._store = open_store(request.store)
        key = request.key()
        if not STAGES[self.stage].per_run and (receipt := proven_receipt(self._store, self.stage, key)) is not None:
            self.log.info("%s/%s is already in the store: nothing to do", self.stage, key)
            return self._hand_on(receipt, context)
        self._launcher = get_launcher(self.launcher)
        self._forget_other_job(context)
        receipt = self.execute_resumable(context)
        # The id has served: clearing a task that succeeded is to run it again, not to adopt its old job.
        if (state := context.get("task_state_store")) is not None:
            state.delete(self.external_id_key)
        return self._hand_on(receipt, context)

    def _hand_on(self, receipt: Receipt, context: Context) -> dict[str, Any]:
        result = task_result(receipt, self._request.store)
        self.receipt_address = result["address"]
        self._show_mlflow(receipt.details if self.stage == "plan" else self._plan_details, context)
        self.log.info("Result: %s, %s, %s", result["address"], receipt.counts, receipt.metrics)
        return result

    def _show_mlflow(self, plan_details: Mapping[str, Any], context: Context) -> None:
        url = mlflow_run_url(plan_details)
        if url and url != self.mlflow_url:
            self.mlflow_url = url
            context["ti"].xcom_push(key=MlflowRunLink().xcom_key, value=url)

    # ---- the request ------------------------------------------------------------------------------------------------

    def _build_request(self, context: Context) -> StageRequest:
        args = dict(self.args or {})
        if self.stage == "plan":
            self._plan_details: dict[str, Any] = {}
            # `params` leaves out what the form does not know; a misspelled key of the run's conf must not.
            spec = spec_from_form({**context["params"], **(context["dag_run"].conf or {})})
            root = spec.store or os.environ.get("DRAFTER_STORE")
            if not root:
                raise ConfigurationError(
                    Problem("store", None, "s3://bucket/prefix or a folder: here or DRAFTER_STORE")
                )
            inputs = {}
        else:
            [ref] = collect_inputs({"plan": self.plan})["plan"]
            root = str(self.plan["store"])
            self._plan_details = details = read_receipt(open_store(root), ref.kind, ref.key).details
            spec = RunSpec(**details["spec"])
            args.update({name: details[detail] for name, detail in (self.plan_args or {}).items()})
            expect = {name: len(list(items)) for name, items in (self.expect or {}).items()}
            inputs = collect_inputs(self.inputs, self.group, expect)
            self._show_mlflow(details, context)
        run = self._run_context(context)
        request = StageRequest(stage=self.stage, store=root, spec=spec, inputs=inputs, args=args, run=run)
        ti = context["ti"]
        identity = [ti.dag_id, ti.run_id, ti.task_id, ti.map_index or 0, request.key()]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        job = re.sub(r"[^a-z0-9]+", "-", f"{self.stage}-{digest}".lower())
        return request.model_copy(update={"run": run.model_copy(update={"job": job})})

    def _run_context(self, context: Context) -> RunContext:
        ti = context["ti"]
        mapped = ti.map_index is not None and ti.map_index >= 0
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        return RunContext(
            run_id=ti.run_id,
            task=f"{ti.task_id}-{ti.map_index}" if mapped else ti.task_id,
            try_number=ti.try_number,
            airflow_url=f"{base}/dags/{quote(ti.dag_id)}/runs/{quote(ti.run_id)}" if base else None,
            mlflow_run_id=self._plan_details.get("mlflow_run_id"),
        )

    def _job_gpus(self) -> int:
        if self.gpus is not None:
            return self.gpus
        return int(STAGES[self.stage].needs_gpu and self._request.spec.device != "cpu")

    # ---- ResumableJobMixin ------------------------------------------------------------------------------------------

    def _forget_other_job(self, context: Context) -> None:
        """Between two tries the inputs may have changed, and the job's name with them: the old job is not ours."""
        state = context.get("task_state_store")
        if state is None:
            return
        old = state.get(self.external_id_key)
        if old and old != self._request.run.job:
            self.log.info("Job %s of an earlier try worked on other inputs; it is ended", old)
            self._the_launcher.stop(str(old), grace=STOP_GRACE_SECONDS)
            state.delete(self.external_id_key)

    @property
    def _the_launcher(self) -> Launcher:
        if self._launcher is None:
            raise RuntimeError("the launcher is chosen in execute()")
        return self._launcher

    def submit_job(self, context: Context) -> JsonValue:
        """Start the job, or adopt the one of that name that runs. Returns its name."""
        request, ti = self._request, context["ti"]
        labels = {"dag": ti.dag_id, "run": ti.run_id, "task": request.run.task, "try": str(ti.try_number)}
        data = request.model_dump_json().encode()
        self._adopted = not self._the_launcher.submit(Job(request.run.job, data, self._job_gpus(), labels))
        return request.run.job

    def get_job_status(self, external_id: JsonValue, context: Context) -> str:
        """State of the job: absent, running, lost, `exited N`."""
        return str(self._the_launcher.status(str(external_id)))

    def is_job_active(self, status: str) -> bool:
        """Whether the job can be adopted."""
        return status == "running"

    def is_job_succeeded(self, status: str) -> bool:
        """Whether the job ended with exit code 0; its receipt is still to be proven."""
        return status == "exited 0"

    def poll_until_complete(self, external_id: JsonValue, context: Context) -> Any:
        """Pass the job's log on until it ends. Returns the receipt: the mixin makes this the result of a try that
        adopted a running job.

        Raises:
            JobFailed: if the job gave no result.
        """
        job = str(external_id)
        if self._adopted:
            self.log.info("Job %s was started by an earlier try; following it from here", job)
        else:
            self.log.info("Job %s on %s", job, self._the_launcher.name)
        lines = JobLog(self._the_launcher, job, self._emit, LOG_END if self._adopted else "")
        pause = FIRST_POLL_SECONDS
        while True:
            status = self._the_launcher.status(job)
            lines.forward()
            if self._stopped and self._leave:
                raise StageFailed(
                    f"{self.stage}: this task was ended while Airflow's API did not answer; job {job} goes on and the "
                    "next try adopts it"
                )
            if self._stopped:
                self._the_launcher.stop(job, grace=STOP_GRACE_SECONDS)
                lines.forward(final=True)
                raise StageFailed(f"{self.stage}: job {job} was ended because Airflow ended this task")
            if status.state != "running":
                lines.forward(final=True)
                self._receipt = result_of(self._request, status, self._the_launcher)
                return self._receipt
            time.sleep(pause)
            pause = min(LAST_POLL_SECONDS, pause * 1.5)

    def get_job_result(self, external_id: JsonValue, context: Context) -> Any:
        """The receipt of a job that ended.

        Raises:
            JobFailed: if the job gave no result.
        """
        if self._receipt is None:
            self._receipt = result_of(self._request, self._the_launcher.status(str(external_id)), self._the_launcher)
        return self._receipt

    def _emit(self, line: str) -> None:
        self.log.info("%s", line)


def plan_details(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Details of the plan's receipt.

    Args:
        plan: result of the `plan` task.
    """
    [ref] = refs_of(plan)
    return read_receipt(open_store(str(plan["store"])), ref.kind, ref.key).details
