"""Where things stand below the store's root. No path is built anywhere else.

Artifacts: `<kind>/<key>/<attempt>/<object>` and `<kind>/<key>/receipt.json`. Keys are digests of inputs, so no path
holds a run id, a position or a date. Mutable state of a run (progress, failure reports) stands under `runs/<run>/`.
"""

from __future__ import annotations

import hashlib
import re

RECEIPT = "receipt.json"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def artifact_prefix(kind: str, key: str) -> str:
    """Folder of one artifact."""
    return f"{kind}/{key}"


def receipt_path(kind: str, key: str) -> str:
    """The receipt of one artifact."""
    return f"{kind}/{key}/{RECEIPT}"


def object_path(kind: str, key: str, attempt: str, name: str) -> str:
    """One object of one attempt at an artifact."""
    return f"{kind}/{key}/{attempt}/{name}"


def run_folder(run_id: str) -> str:
    """Readable and unique: Airflow's run ids hold colons and plus signs."""
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:8]
    return f"runs/{_UNSAFE.sub('-', run_id).strip('-')[:80]}-{digest}"


def progress_path(run_id: str, task: str) -> str:
    """Progress of one task of a run: replaced while it works."""
    return f"{run_folder(run_id)}/progress/{task}.json"


def failure_path(run_id: str, job: str) -> str:
    """Why the last try of a job failed."""
    return f"{run_folder(run_id)}/failures/{job}.json"


def latest_checkpoint_path(train_key: str) -> str:
    """Pointer to the newest checkpoint of a training; moved by compare-and-set, never written blindly."""
    return f"train/{train_key}/latest.json"


def checkpoint_prefix(train_key: str, attempt: str, step: int) -> str:
    """Folder of one checkpoint of one attempt at a training."""
    return f"train/{train_key}/{attempt}/checkpoint-{step:08d}"
