"""What becomes of memory that MLX's CPU build frees.

MLX 0.32.4 takes every array of its CPU device from `malloc` and gives it back with `free`; only
its GPU devices keep a cache of freed buffers. glibc returns the top of its heap to the kernel
as soon as a few MB of it are free, so that each new cache, chunk or batch pays for its pages
again: a third of the time of a short prompt behind a long stored prefix.

glibc also merges all its small free blocks ("fast bins") whenever a block above 64 KiB is freed
(`FASTBIN_CONSOLIDATION_THRESHOLD`, malloc.c of glibc 2.36). A decode step frees thousands of small
blocks between its arrays.
"""

from __future__ import annotations

import ctypes
import sys

KEPT = 1 << 30
"""Bytes that stay with the process when they are freed: what MLX would cache on a GPU."""
LARGEST = (KEPT, 32 << 20)
"""Sizes up to which arrays come from the heap, in order of preference: glibc before 2.35 takes
no more than the second."""
M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = 1, -1, -3, -8


def keep_freed() -> bool:
    """Let this process keep freed memory for its next arrays, and merge small free blocks at once;
    whether its C library can.

    All threads share one heap: `malloc_trim` (glibc 2.35) returns the top of no other, and up to
    64 MB would stay with each thread that has ever decoded an image. For a process whose work is
    the engine. Without effect on macOS.
    """
    if not _is_glibc():
        return False
    libc = ctypes.CDLL(None)
    settings = ((M_TRIM_THRESHOLD, KEPT), (M_ARENA_MAX, 1), (M_MXFAST, 0))
    kept = all(libc.mallopt(*each) for each in settings)
    return any(libc.mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST) and kept


def give_back() -> None:
    """Return all free memory to the system: for what is rare and large beside MLX's arrays.

    Without effect on macOS, which returns large blocks as they are freed.
    """
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
