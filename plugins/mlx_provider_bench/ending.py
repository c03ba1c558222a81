"""A benchmark that a signal ends takes along what it has started."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mlx_provider.gateway.foreground import PASSED_ON, Ended


@contextmanager
def ending_once() -> Iterator[None]:
    """The first signal that ends a process raises `Ended` in the main thread; later ones nothing.

    Servers are told to end and then waited for, in bounded time: a second Ctrl-C that interrupted
    that would leave some of them.
    """
    before = {number: signal.signal(number, _end) for number in PASSED_ON}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _end:  # else the process is about to end
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    for each in PASSED_ON:
        signal.signal(each, signal.SIG_IGN)
    sys.stderr.write("\nending the servers that were started ...\n")
    raise Ended(number)


@contextmanager
def held() -> Iterator[None]:
    """Signals wait: who would end a process that is being started does not know it yet."""
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
