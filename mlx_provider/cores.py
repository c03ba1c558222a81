"""CPU cores that this process may use."""

import os
import sys
from pathlib import Path


def cores() -> int:
    """How many cores, 1 or more, by the process's affinity and a container's quota."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(allowed, _quota() or allowed))


def _quota() -> int | None:
    """Cores that the container's cgroup (version 2) allows, rounded up; `None`: no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None
