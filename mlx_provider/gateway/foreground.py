"""A program in the terminal's foreground: what it is sent, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Ended(KeyboardInterrupt):
    """A signal that ends this process was received before there was a program to hand it to.

    Like Ctrl-C it passes whatever holds back the errors of a request or a plugin.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Signals that end a process raise `Ended` in the main thread, so that clean-ups run."""
    before = {number: signal.signal(number, _raise) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Ended(number)


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program on this process's own terminal, and wait for it.

    Its exit code; 128 and the number for one that a signal ended, as a shell has it. What would end
    this process goes to the program, which decides. Raises `OSError` where it cannot start.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None and not (number in TYPED and _in_foreground()):
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in PASSED_ON}
    try:
        process = subprocess.Popen([*command], env=dict(environment))
        for number in received:  # between the two lines above
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


TYPED = (signal.SIGINT, signal.SIGQUIT)
"""What a terminal sends to the whole group in its foreground, the program among it."""


def _in_foreground() -> bool:
    """Whether the terminal's keys reach this process's group, and so the program."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
