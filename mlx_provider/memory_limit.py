"""Limits a child process's memory where `RLIMIT_AS` is not enforced (macOS)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 0.1
"""Seconds between readings."""
ENFORCED = sys.platform == "linux"
"""Whether a process's own limit holds."""


@contextmanager
def memory_limit(process: subprocess.Popen[bytes], limit: int) -> Iterator[None]:
    """Kill `process` above `limit` bytes of resident memory during the block."""
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
    """Bytes; 0: the process has ended."""
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    printed = subprocess.run(command, capture_output=True, check=False).stdout.strip()
    return int(printed or 0) * 1024
