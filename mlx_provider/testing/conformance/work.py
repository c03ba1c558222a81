"""A bound for the work of a plugin."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .check import Nonconformity

LEAST_SECONDS = 0.01


@contextmanager
def bounded(seconds: float, what: str) -> Iterator[None]:
    """Raise `Nonconformity` inside the block after `seconds` of processor time of the main thread.
    Without effect in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    summary = f"{what} was not done after {seconds:g} s of work"
    passed: list[bool] = []
    end = time.thread_time() + seconds

    def stop(number: int, frame: Any) -> None:
        left = end - time.thread_time()
        if left > 0:  # the timer counts other threads, too
            signal.setitimer(signal.ITIMER_PROF, max(left, LEAST_SECONDS))
            return
        passed.append(True)
        raise Nonconformity(summary)

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if passed:  # the isolation of the plugin has caught it
        raise Nonconformity(summary)
