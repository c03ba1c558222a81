"""A benchmark that a signal ends takes along what it has started."""

from __future__ import annotations

import signal
import sys
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
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            sys.stderr.write("\nending the servers that were started ...\n")
            raise Ended(number)

    before = {number: signal.signal(number, end) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
