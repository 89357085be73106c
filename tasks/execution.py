"""Executing one stage: find what is there, open store, tracker and device, run, prove the receipt."""

from __future__ import annotations

import importlib
import logging
import time
from pathlib import Path
from typing import cast

from tasks.contract.errors import DeviceUnavailable, StageError
from tasks.contract.receipt import Receipt
from tasks.contract.request import StageRequest
from tasks.contract.stages import STAGES
from tasks.stages.context import StageContext, StageFunction
from tasks.storage import open_store
from tasks.storage.artifact import find_receipt
from tasks.storage.base import Store
from tasks.tracking import Tracker, log_receipt, open_tracker

log = logging.getLogger("tasks")


def execute(
    request: StageRequest, *, store: Store | None = None, tracker: Tracker | None = None, cache: Path | None = None
) -> Receipt:
    """Run one stage, or return the receipt that equal inputs already have.

    Args:
        request: the stage, its spec, inputs and arguments.
        store: where artifacts are; opened from the request if not given.
        tracker: where to log; opened from the request if not given.
        cache: folder for local copies of verified objects; a scratch folder if not given.

    Raises:
        StageError: the stage's own verdict.
    """
    store = store or open_store(request.store)
    key = request.key()
    stage = STAGES[request.stage]
    if not stage.per_run and (found := find_receipt(store, request.stage, key)):
        log.info("%s/%s is already in the store: nothing to do", request.stage, key)
        return found
    tracker = tracker or open_tracker(request.run)
    device = resolve_device(request.spec.device) if stage.needs_gpu else "cpu"
    function = cast(StageFunction, importlib.import_module(f"tasks.stages.{request.stage}").run)
    started = time.monotonic()
    log.info("%s: start on %s, key %s, try %d", request.stage, device, key, request.run.try_number)
    with StageContext(request, store, tracker, device, cache) as ctx:
        receipt = function(ctx)
    if (receipt.kind, receipt.key) != (request.stage, key):
        raise StageError(
            f"stage {request.stage} returned the receipt of {receipt.kind}/{receipt.key}, expected key {key}"
        )
    if not stage.per_run:
        # Mapped stages would overwrite each other's figures; the stage that joins them has the totals.
        if not request.run.task.rpartition("-")[2].isdigit():
            log_receipt(tracker, receipt)
        tracker.set_tags({f"drafter.live.{request.stage}": key})
    log.info("%s: done in %.1f s", request.stage, time.monotonic() - started)
    return receipt


def resolve_device(asked: str) -> str:
    """`cpu` or `cuda` for what the spec asks.

    Raises:
        DeviceUnavailable: `cuda` is asked for and PyTorch sees none. Never a silent run on the CPU.
    """
    if asked == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise DeviceUnavailable(
            f"device: found no GPU (PyTorch {torch.__version__}, CUDA build: {torch.version.cuda or 'none'}); expected "
            "one, since the spec says device=cuda. Check the driver, the container's GPU request, and that the CUDA "
            "variant of PyTorch is installed; or set device=cpu."
        )
    return "cpu"
