"""A deployment in a temporary folder: folder store, process launcher, stub stages; and Airflow's context as a dict."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from operators.container import ContainerTaskOperator
from operators.launchers.process import ProcessLauncher
from tasks.contract.receipt import Receipt
from tasks.contract.spec import RunSpec
from tasks.storage import open_store
from tasks.storage.artifact import ArtifactWriter

STUB = Path(__file__).with_name("stub_tasks.py")


class StateStore:
    """`task_state_store` in a file: it outlives the process, like Airflow's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _all(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}

    def get(self, key: str) -> Any:
        return self._all().get(key)

    def _write(self, values: dict[str, Any]) -> None:
        partial = self.path.with_name(f"state-{threading.get_ident()}")
        partial.write_text(json.dumps(values))
        os.replace(partial, self.path)

    def set(self, key: str, value: Any) -> None:
        self._write({**self._all(), key: value})

    def delete(self, key: str) -> None:
        self._write({k: v for k, v in self._all().items() if k != key})


@dataclasses.dataclass
class Deployment:
    folder: Path
    monkeypatch: pytest.MonkeyPatch
    lines: list[str]

    def behave(self, how: str, stage: str = "*") -> None:
        self.monkeypatch.setenv("STUB", json.dumps({stage: how}))

    @property
    def launcher(self) -> ProcessLauncher:
        return ProcessLauncher.from_environment()

    @property
    def store(self) -> Any:
        return open_store(os.environ["DRAFTER_STORE"])

    def starts(self) -> list[str]:
        """A line for each time the stub was started."""
        path = self.folder / "starts"
        return path.read_text().splitlines() if path.exists() else []

    def family(self) -> list[int]:
        path = self.folder / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def plan(self, **details: Any) -> dict[str, Any]:
        """Result of a `plan` task, with its receipt in the store."""
        key = "a" * 32
        receipt = Receipt(
            kind="plan",
            version=1,
            key=key,
            identity=key,
            attempt="1",
            details={
                "spec": RunSpec().model_dump(mode="json"),
                "target_fingerprint": "fingerprint",
                "file_groups": [["a"], ["b"]],
                "mlflow_run_id": "0123abcd",
                "mlflow_url": "http://127.0.0.1:5000/#/experiments/7/runs/0123abcd",
                **details,
            },
        )
        stored = ArtifactWriter(self.store, "plan", key, "1").commit(receipt)
        return {"ref": stored.ref().model_dump(), "store": self.store.root, "counts": {}, "metrics": {}, "address": ""}

    def operator(self, stage: str = "target", **arguments: Any) -> ContainerTaskOperator:
        return ContainerTaskOperator(task_id=stage, stage=stage, **arguments)

    def context(self, operator: ContainerTaskOperator, *, try_number: int = 1, **values: Any) -> Any:
        pushed: dict[str, Any] = {}
        ti = SimpleNamespace(
            dag_id="train_drafter",
            run_id="manual__2026-12-01T00:00:00+00:00",
            task_id=operator.task_id,
            map_index=-1,
            try_number=try_number,
            stats_tags={},
            pushed=pushed,
            xcom_push=lambda key, value: pushed.update({key: value}),
        )
        context = {
            "ti": ti,
            "params": {"preset": "demo"},
            "dag_run": SimpleNamespace(conf={}),
            "task_state_store": StateStore(self.folder / "state.json"),
        }
        return {**context, **values}

    def run(self, stage: str = "target", **arguments: Any) -> dict[str, Any]:
        """Execute one task as its first try."""
        arguments.setdefault("plan", None if stage == "plan" else self.plan())
        operator = self.operator(stage, **arguments)
        return operator.execute(self.context(operator))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)


class _Log:
    """Airflow's task log as a list of lines."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def info(self, message: str, *args: Any, **fields: Any) -> None:
        self.lines.append(message % args if args else message)

    debug = warning = error = info


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    python = tmp_path / "tasks-python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" "$@"\n')
    python.chmod(0o755)
    for name, value in {
        "DRAFTER_HOME": str(tmp_path / "home"),
        "DRAFTER_STORE": str(tmp_path / "store"),
        "DRAFTER_TASKS_PYTHON": str(python),
        "STUB_STARTS": str(tmp_path / "starts"),
        "STUB_PIDS": str(tmp_path / "pids"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("DRAFTER_LAUNCHER", "STUB", "MLFLOW_PUBLIC_URL"):
        monkeypatch.delenv(name, raising=False)
    lines: list[str] = []
    monkeypatch.setattr(ContainerTaskOperator, "log", _Log(lines))
    return Deployment(tmp_path, monkeypatch, lines)


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process exists and is not a zombie."""

    def check(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in "ZX"

    return check
