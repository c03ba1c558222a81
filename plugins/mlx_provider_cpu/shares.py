"""Divides work into shares, each on its own core. If no core is idle, Linux runs a woken thread on
the core of its waker. The threads of MLX's BLAS spin between two products, so no core is idle. So
each of our threads stays off the core of the thread that waits for it; otherwise two cores were no
faster than one."""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from mlx_provider.cores import cores

T = TypeVar("T")
count = functools.cache(cores)
_placed = threading.local()


def on_cores(work: Callable[[T], None], shares: Sequence[T]) -> None:
    """The first share runs in this thread. Raises the errors of all shares."""
    first, *others = shares
    if not others:
        work(first)
        return
    here = ctypes.CDLL(None).sched_getcpu() if sys.platform == "linux" else None
    running = [_pool().submit(_apart, here, work, share) for share in others]
    work(first)
    for one in running:
        one.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, count() - 1), thread_name_prefix="core")


@functools.cache
def _allowed() -> set[int]:
    """The cores of this process, before its threads are placed."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set()


def _apart(core: int | None, work: Callable[[T], None], share: T) -> None:
    if core is not None and getattr(_placed, "off", None) != core and len(_allowed()) > 1:
        _placed.off = core
        with suppress(OSError):  # a system that refuses it may use one core
            os.sched_setaffinity(0, _allowed() - {core})
    work(share)
