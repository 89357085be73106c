"""The command line of the task side.

    python -m tasks run --request FILE          one stage, as an operator asks for it
    python -m tasks chain --preset demo --store ./artifacts --set block_size=8 --until check
                                                the stages in order, in this process, without Airflow
    python -m tasks parameters                  the table of parameters, as Markdown

Exit codes are those of `tasks.contract.errors`. If it is killed: what has a receipt stays, the rest is done again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from tasks.contract.errors import ConfigurationError, FailureReport, Interrupted, Problem, StageError, StorageError
from tasks.contract.layout import failure_path
from tasks.contract.presets import DEFAULT_PRESET, PRESETS, spec_from_form
from tasks.contract.request import StageRequest
from tasks.contract.stages import STAGES

log = logging.getLogger("tasks")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Stages of the drafter pipeline.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run one stage as a request file says")
    run.add_argument("--request", type=Path, required=True, help="JSON file: tasks.contract.request.StageRequest")
    chain = commands.add_parser("chain", help="run the stages in order in this process, without Airflow")
    chain.add_argument("--preset", choices=sorted(PRESETS), default=DEFAULT_PRESET)
    chain.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a parameter; VALUE is JSON, or text (repeatable)",
    )
    chain.add_argument("--store", help="artifact store: s3://bucket/prefix or a folder (default: DRAFTER_STORE)")
    chain.add_argument(
        "--until",
        choices=[n for n in STAGES if STAGES[n].inputs or n in ("plan", "target")],
        help="stop after this stage",
    )
    chain.add_argument("--run-id", default=None, help="name of the run (default: by-hand and the time)")
    commands.add_parser("parameters", help="print the table of parameters as Markdown")
    options = parser.parse_args(argv)
    _set_up_process()
    if options.command == "parameters":
        from tasks.parameters import markdown_table

        print(markdown_table())
        return 0
    if options.command == "run":
        return run_request(options.request)
    return _run_chain(options)


def run_request(file: Path) -> int:
    """Run the stage of a request file; returns its exit code and leaves a failure report if it fails."""
    try:
        request = StageRequest.model_validate_json(file.read_text())
    except (OSError, ValidationError) as error:
        return _failed(None, ConfigurationError(Problem("request", str(file), f"a readable stage request ({error})")))
    try:
        from tasks.execution import execute

        receipt = execute(request)
    except Exception as error:
        return _failed(request, error)
    log.info("%s: receipt %s/%s", request.stage, receipt.kind, receipt.key)
    return 0


def _run_chain(options: argparse.Namespace) -> int:
    try:
        overrides = dict(_assignment(text) for text in options.set)
        spec = spec_from_form({"preset": options.preset, **overrides})
        root = options.store or spec.store or os.environ.get("DRAFTER_STORE")
        if not root:
            raise ConfigurationError(Problem("store", None, "s3://bucket/prefix or a folder: --store or DRAFTER_STORE"))
        from tasks.chain import run_chain

        run_id = options.run_id or time.strftime("by-hand-%Y%m%dT%H%M%S")
        run_chain(spec, root, run_id, until=options.until)
    except Exception as error:
        return _failed(None, error)
    return 0


def _assignment(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigurationError(Problem("--set", text, "FIELD=VALUE"))
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _failed(request: StageRequest | None, error: BaseException) -> int:
    """Say what failed, in the log for people and as a report for the operator."""
    report = FailureReport.of(request.stage if request else "command", error)
    if isinstance(error, StageError):
        log.error("%s\n%s", report.error, report.message)
        log.debug("traceback", exc_info=error)
    else:
        log.error("%s: %s", report.error, report.message, exc_info=error)
    data = report.model_dump_json().encode()
    if local := os.environ.get("DRAFTER_FAILURE_FILE"):
        # First and on this machine: the store itself may be what failed.
        Path(local).write_bytes(data)
    if request is not None:
        from tasks.storage import open_store

        try:
            open_store(request.store).write(failure_path(request.run.run_id, request.run.job), data)
        except (StorageError, StageError) as second:
            log.warning("the failure report could not be written to the store: %s", second)
    return report.exit_code


def _set_up_process() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for noisy in ("botocore", "urllib3", "httpx", "alembic", "matplotlib", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress is ours: one line at a human rate
    os.environ.setdefault("MPLBACKEND", "Agg")
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    # Further signals are ignored until the stage has saved what it has.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted("stopped by SIGTERM; what was finished is in the store, another try goes on from there")
