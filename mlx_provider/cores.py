"""CPU cores that this process may use."""

import os
import sys
from pathlib import Path


def cores() -> int:
    """By the process's affinity and a container's quota."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(allowed, _quota() or allowed))


def _quota() -> int | None:
    """Of the container's cgroup (version 2), in whole cores."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None
