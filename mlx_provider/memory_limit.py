"""A limit on the memory of a child process, for systems that do not enforce `RLIMIT_AS` (macOS)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 0.1
"""Seconds between two readings."""
ENFORCED = sys.platform == "linux"
"""Whether the limit that the process sets for itself holds."""


@contextmanager
def memory_limit(process: subprocess.Popen[bytes], limit: int) -> Iterator[None]:
    """Kill `process` if it has more than `limit` bytes of resident memory within this context."""
    if ENFORCED:
        yield
        return
    left = threading.Event()
    watch = threading.Thread(target=_watch, args=(process, limit, left), daemon=True)
    watch.start()
    try:
        yield
    finally:
        left.set()
        watch.join()


def _watch(process: subprocess.Popen[bytes], limit: int, left: threading.Event) -> None:
    while not left.wait(INTERVAL):
        if _resident(process.pid) > limit:
            process.kill()
            return


def _resident(pid: int) -> int:
    """Bytes of resident memory; 0: the process has ended."""
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    printed = subprocess.run(command, capture_output=True, check=False).stdout.strip()
    return int(printed or 0) * 1024
