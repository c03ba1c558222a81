import time
from collections.abc import Callable
from typing import TypeVar

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
