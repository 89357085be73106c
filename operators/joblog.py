"""A job's log, passed on into the Airflow task log line by line."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable

from operators.launchers.base import Launcher

CHUNKS = 8  # passed on between two looks at the job: a job that prints without end must not keep us from stopping it
LINE_CHARACTERS = 8192  # of a line; the rest is in the job's own log


class JobLog:
    """Follows one job's log.

    Bytes that are not UTF-8 become U+FFFD. A longer line than `LINE_CHARACTERS` is cut, saying how long it was:
    a log line goes through a socket and a JSON parser on its way to the UI.
    """

    def __init__(self, launcher: Launcher, job: str, emit: Callable[[str], object], cursor: str = "") -> None:
        self._launcher, self._job, self._emit, self._cursor = launcher, job, emit, cursor
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line, self._length = "", 0  # what is kept of the unfinished line, and its whole length

    def forward(self, *, final: bool = False) -> None:
        """Pass on what is new: some of it, or with `final` all of it, an unfinished last line included."""
        for _ in itertools.count() if final else range(CHUNKS):
            data, self._cursor = self._launcher.logs(self._job, self._cursor)
            if not data:
                break
            self._take(self._decoder.decode(data))
        if final:
            self._take(self._decoder.decode(b"", final=True))
            if self._length:
                self._flush()

    def _take(self, text: str) -> None:
        *ended, rest = text.split("\n")
        for part in ended:
            self._add(part)
            self._flush()
        self._add(rest)

    def _add(self, part: str) -> None:
        self._line += part[: LINE_CHARACTERS - len(self._line)]
        self._length += len(part)

    def _flush(self) -> None:
        cut = (
            f" … ({self._length:,} characters; all of it is in the job's log)" if self._length > len(self._line) else ""
        )
        # A progress bar redraws its line with carriage returns: what a terminal would show in the end.
        shown = self._line.rstrip("\r").rpartition("\r")[2]
        self._emit(shown + cut)
        self._line, self._length = "", 0
