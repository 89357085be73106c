"""Progress of long work: one line in the log at a human rate, one small object for the UI page."""

from __future__ import annotations

import json
import logging
import time
from types import TracebackType
from typing import Self

from tasks.contract.layout import progress_path
from tasks.contract.request import RunContext
from tasks.storage.base import Store

log = logging.getLogger("tasks")
LOG_SECONDS = 10.0
STORE_SECONDS = 5.0


class Progress:
    """Counts units and reports rate and time left. Use as a context manager."""

    def __init__(self, store: Store, run: RunContext, *, total: int, unit: str, label: str) -> None:
        self._store, self._run = store, run
        self._total, self._unit, self._label = total, unit, label
        self._done = 0
        self._extra: dict[str, float | str] = {}
        self._start = self._logged = self._stored = time.monotonic()

    def __enter__(self) -> Self:
        self._put()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put()
        if kind is None:
            self._log()

    def add(self, count: int = 1, **extra: float | str) -> None:
        """Count `count` more units; `extra` are further figures to show (loss=2.31, tokens_per_second=410.0)."""
        self._done += count
        self._extra.update(extra)
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            self._log()
        if now - self._stored >= STORE_SECONDS:
            self._stored = now
            self._put()

    @property
    def done(self) -> int:
        """Units counted so far."""
        return self._done

    def rate(self) -> float:
        """Units a second since the start."""
        return self._done / max(time.monotonic() - self._start, 1e-9)

    def seconds_left(self) -> float | None:
        """Estimated from the mean rate; None before the first unit."""
        return (self._total - self._done) / self.rate() if self._done else None

    def _log(self) -> None:
        left = self.seconds_left()
        eta = f", {_duration(left)} left" if left and self._done < self._total else ""
        extra = "".join(
            f", {name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f", {name} {value}"
            for name, value in self._extra.items()
        )
        log.info(
            "%s: %s of %s %s, %.1f/s%s%s",
            self._label,
            f"{self._done:,}",
            f"{self._total:,}",
            self._unit,
            self.rate(),
            eta,
            extra,
        )

    def _put(self) -> None:
        state = {
            "task": self._run.task,
            "label": self._label,
            "unit": self._unit,
            "done": self._done,
            "total": self._total,
            "rate": round(self.rate(), 3),
            "seconds_left": self.seconds_left(),
            "updated_at": time.time(),
            "try_number": self._run.try_number,
            **self._extra,
        }
        self._store.write(progress_path(self._run.run_id, self._run.task), json.dumps(state).encode())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
