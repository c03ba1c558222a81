"""Holds signals back while a process starts, so that the benchmark can end it later."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mlx_provider.commands import PASSED_ON


@contextmanager
def held() -> Iterator[None]:
    """Signals wait until the clean-up knows a process that is being started."""
    received: list[int] = []

    def later(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # which no signal interrupts
        return
    before = {number: signal.signal(number, later) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
