"""Following a Dag run at the terminal: a line for each change of a task's state, and progress as stages report it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from operators.embedded.airflow_client import AirflowClient, ApiError
from tasks.contract.errors import FailureReport, StorageError
from tasks.contract.layout import run_folder
from tasks.storage.base import Store

POLL_SECONDS = 2.0
FINISHED = ("success", "failed")
_TOLERATED_SECONDS = 60.0  # Airflow may be busy, or be started again, for so long
_BASIC = ("task", "label", "unit", "done", "total", "rate", "seconds_left", "updated_at", "try_number")


@dataclass
class Follower:
    """Prints what changes in one run until it has finished."""

    client: AirflowClient
    store: Store
    dag_id: str
    run_id: str
    say: Callable[[str], None]
    poll_seconds: float = POLL_SECONDS
    _states: dict[str, tuple[str, int]] = field(default_factory=dict)
    _progress: dict[str, str] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def follow(self) -> str:
        """Return the final state of the run.

        Raises:
            OSError, ApiError: if Airflow does not answer for a minute.
        """
        answered = time.monotonic()
        while True:
            try:
                state = str(self.client.run(self.dag_id, self.run_id)["state"])
                self._tasks()
                self._reports()
                answered = time.monotonic()
            except (OSError, ApiError, StorageError) as error:
                if time.monotonic() - answered > _TOLERATED_SECONDS:
                    raise
                print(f"(no answer: {error})", file=sys.stderr)
                state = "unknown"
            if state in FINISHED:
                return state
            time.sleep(self.poll_seconds)

    def _tasks(self) -> None:
        entries = self.client.task_instances(self.dag_id, self.run_id)
        for entry in sorted(entries, key=lambda e: (e.get("start_date") or "~", e["task_id"], e["map_index"])):
            state, number = str(entry["state"] or "waiting"), int(entry["try_number"] or 0)
            name = task_name(entry)
            before = self._states.get(name)
            if before == (state, number) or (before is None and state == "waiting"):
                continue
            self._states[name] = (state, number)
            took = f" in {entry['duration']:.0f} s" if state in FINISHED and entry.get("duration") else ""
            again = f" (try {number})" if number > 1 else ""
            self._line(f"{name:<14} {state}{took}{again}")
            if state == "up_for_retry":
                for report in failure_reports(self.store, self.run_id):
                    if report.stage == entry["task_id"]:
                        self._line(f"{name:<14}   {report.error}: {report.message.splitlines()[0]}")

    def _reports(self) -> None:
        for progress in progress_objects(self.store, self.run_id):
            if progress["done"] <= 0:
                continue
            line = progress_line(progress)
            if self._progress.get(progress["task"]) != line:
                self._progress[progress["task"]] = line
                self._line(f"{progress['task']:<14} {line}")

    def _line(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        self.say(f"{minutes:02}:{seconds:02}  {text}")


def task_name(entry: dict[str, Any]) -> str:
    """`extract[3]`, or `train` for a task that is not mapped."""
    return entry["task_id"] if entry["map_index"] < 0 else f"{entry['task_id']}[{entry['map_index']}]"


def progress_objects(store: Store, run_id: str) -> Iterator[dict[str, Any]]:
    """Progress of each task of a run, as the tasks wrote it (`tasks.progress`)."""
    for info in store.list(f"{run_folder(run_id)}/progress/"):
        yield json.loads(store.read(info.path))


def failure_reports(store: Store, run_id: str) -> list[FailureReport]:
    """What failed stages of a run have left."""
    infos = sorted(store.list(f"{run_folder(run_id)}/failures/"), key=lambda info: info.modified)
    return [FailureReport.model_validate_json(store.read(info.path)) for info in infos]


def progress_line(progress: dict[str, Any]) -> str:
    """One progress object in words: `extract: 1,024 of 4,096 samples, 33.1/s, 1 min 33 s left, loss 2.3`."""
    done, total, rate = progress["done"], progress["total"], progress["rate"]
    text = f"{progress['label']}: {done:,} of {total:,} {progress['unit']}, {rate:.1f}/s"
    left = progress["seconds_left"]
    if left and done < total:
        minutes, seconds = divmod(round(left), 60)
        text += f", {minutes} min {seconds:02} s left" if minutes else f", {seconds} s left"
    for name, value in progress.items():
        if name not in _BASIC:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            text += f", {name.replace('_', ' ')} {shown}"
    return text
