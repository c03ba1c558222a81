import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import httpx

T = TypeVar("T")
PATIENCE = 300.0
"""Seconds: far beyond what a loaded machine takes."""


def wait_until(condition: Callable[[], T]) -> T:
    """The first true answer of `condition`."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return answer


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_for_proxy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it is ready. Fails with its log."""

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health/readiness", trust_env=False).is_success
        time.sleep(0.2)  # each question takes processor time
        return False

    wait_until(ready)
