"""Whether a process has ended."""

from __future__ import annotations

import subprocess
import time

LIMIT = 60.0
PAUSE = 0.02


def is_gone(pid: int) -> bool:
    """Ended, in a while; a zombie is nobody's any more: its new parent may not have looked yet."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False
        ).stdout.strip()
        if not state or state.startswith(b"Z"):
            return True
        time.sleep(PAUSE)
    return False
