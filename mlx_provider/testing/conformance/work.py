"""A bound for work that a plugin might never end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .check import Nonconformity


@contextmanager
def bounded(seconds: float, what: str) -> Iterator[None]:
    """Raise `Nonconformity` inside the block after so many seconds of this process's own work.

    Counted in processor time, so that a busy machine is no defect; in the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    told = f"{what} was not done after {seconds:g} s of work"
    passed: list[bool] = []

    def stop(number: int, frame: Any) -> None:
        passed.append(True)
        raise Nonconformity(told)

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if passed:  # whoever isolates the plugin has held it back
        raise Nonconformity(told)
