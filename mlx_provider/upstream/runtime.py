"""Hides messages of transformers that do not concern a request.

Keeps the limit of open files, which the import of mlx_lm lowers (mlx_lm/utils.py 0.32.2).

Settings of the C heap, from which MLX 0.32.4 allocates every array of its CPU device.

glibc returns the top of its heap to the kernel when a few MB are free. Each new cache, chunk or
batch then causes page faults again: a third of the time of a short prompt after a long stored
prefix. glibc also merges all small free blocks ("fast bins") when a block above 64 KiB is freed
(`FASTBIN_CONSOLIDATION_THRESHOLD`, malloc.c of glibc 2.36); a decode step frees thousands.

The Linux scheduling policy of the threads of MLX's CPU device.

MLX runs the operations of a stream in a separate thread, woken for each one (mlx 0.32.4,
`mlx/scheduler.h`), possibly on the core of the waking thread. With small arrays, the two then
alternate: measured, 90 context switches for a pass of one layer took a third of the processor time.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def quiet_transformers() -> None:
    """Let transformers log only errors, unless the user has set its level. Call it before its
    import. It warns about missing PyTorch and unknown keys of a `config.json` (transformers
    5.23, `utils/logging.py`)."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def file_limit_kept() -> Iterator[None]:
    """To restore the limit afterwards would need a privilege: the hard limit is lowered, too."""
    original = resource.setrlimit

    def others_only(kind: int, limits: tuple[int, int]) -> None:
        if kind != resource.RLIMIT_NOFILE:
            original(kind, limits)

    resource.setrlimit = others_only
    try:
        yield
    finally:
        resource.setrlimit = original


KEPT = 1 << 30
"""Bytes of freed memory that the process keeps, as MLX's buffer cache does on a GPU."""
LARGEST = (KEPT, 32 << 20)
"""Maximum sizes of arrays on the heap, in order of preference. glibc before 2.35 accepts only the
second one."""
M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = 1, -1, -3, -8


def keep_freed() -> bool:
    """Keep freed memory for the next arrays, merge small free blocks at once, and use one heap.

    Returns whether the C library has these settings; none on macOS. Only for an engine process.
    `malloc_trim` (glibc 2.35) returns the top of the main heap only, so with more heaps each thread
    that has decoded an image would keep up to 64 MB.
    """
    if not _is_glibc():
        return False
    libc = ctypes.CDLL(None)
    settings = ((M_TRIM_THRESHOLD, KEPT), (M_ARENA_MAX, 1), (M_MXFAST, 0))
    kept = all(libc.mallopt(*each) for each in settings)
    return any(libc.mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST) and kept


def give_back() -> None:
    """Return all free memory to the system, after rare and large allocations. No effect on macOS,
    which returns large blocks when they are freed."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def wake_without_preemption() -> None:
    """Let this thread, and the threads that it starts later, not preempt others when they wake up.
    Call it before the first use of MLX in the thread, which starts MLX's thread. No effect if the
    system lacks or refuses the policy."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
