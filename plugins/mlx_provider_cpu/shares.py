"""Divides work into shares, each on its own core. If no core is idle, Linux runs a woken thread on
the core of its waker. The threads of MLX's BLAS spin between two products, so no core is idle. So
each of our threads stays off the core of the thread that waits for it; otherwise two cores were no
faster than one."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mlx_provider.cores import cores

log = logging.getLogger(__name__)
T = TypeVar("T")


def on_cores(work: Callable[[T], None], shares: Sequence[T]) -> None:
    """The first share runs in this thread. Raises the errors of all shares."""
    first, *others = shares
    if not others:
        work(first)
        return
    crew = _crew()
    here = crew.core()
    running = [crew.pool.submit(crew.work_off, here, work, share) for share in others]
    work(first)
    for one in running:
        one.result()


@functools.cache
def count() -> int:
    return cores()


@functools.cache
def _crew() -> Crew:
    return Crew()


class Crew:
    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(max(1, count() - 1), thread_name_prefix="core")
        self._placed = threading.local()
        self._allowed: set[int] = set()
        """Cores for threads; empty where the system does not let us choose."""
        if sys.platform == "linux":
            self._allowed = os.sched_getaffinity(0)
            self._where = ctypes.CDLL(None).sched_getcpu

    def core(self) -> int | None:
        """The core of this thread, if others can be kept off it."""
        return int(self._where()) if len(self._allowed) > 1 else None

    def work_off(self, core: int | None, work: Callable[[T], None], share: T) -> None:
        if core is not None and getattr(self._placed, "off", None) != core:
            self._place(core)
        work(share)

    def _place(self, core: int) -> None:
        self._placed.off = core
        try:
            os.sched_setaffinity(0, self._allowed - {core})
        except OSError as error:
            log.warning("threads cannot be kept apart (%s): attention may use one core", error)
            self._allowed = set()
