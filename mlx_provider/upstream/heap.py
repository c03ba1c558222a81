"""Settings of the C heap, from which MLX 0.32.4 allocates every array of its CPU device.

glibc returns the top of its heap to the kernel when a few MB are free. Each new cache, chunk or
batch then causes page faults again: a third of the time of a short prompt after a long stored
prefix. glibc also merges all small free blocks ("fast bins") when a block above 64 KiB is freed
(`FASTBIN_CONSOLIDATION_THRESHOLD`, malloc.c of glibc 2.36); a decode step frees thousands.
"""

from __future__ import annotations

import ctypes
import sys

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
