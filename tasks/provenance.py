"""Versions of what produced a result, for receipts and MLflow."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "boto3",
    "mlflow-skinny",
    "flash-linear-attention",
)


@cache
def versions() -> dict[str, str]:
    """Python, the packages that can change a result, and the project's own git revision."""
    found = {"python": platform.python_version(), "project": revision()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def revision() -> str:
    """Git commit of the project: DRAFTER_REVISION (set in images), else what git says, else `unknown`."""
    if given := os.environ.get("DRAFTER_REVISION"):
        return given
    root = Path(__file__).resolve().parent.parent
    try:
        out = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return out.stdout.strip()
