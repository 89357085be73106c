"""SIGTERM at a moment when the training's state is half changed waits until it is whole again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_sigterm() -> Iterator[None]:
    """Inside the block SIGTERM is remembered; at its end the handler that was there (which raises) is called.

    Does nothing outside the main thread, where no handler runs, or if SIGTERM has no handler of Python's.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    received: list[FrameType | None] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
    if received:
        previous(signal.SIGTERM, received[0])
