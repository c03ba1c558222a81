"""Runs a program in the terminal's foreground.

A command of minutes: reports progress, and ends quickly by a signal.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Ended(KeyboardInterrupt):
    """A signal to end this process came before there was a program to receive it. Like Ctrl-C, it
    passes through handlers of errors of a request or a plugin."""

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
    """Run a program on this process's terminal. Returns its exit code, or 128 plus the signal that
    ended it.

    Signals that would end this process go to the program, which decides. Raises `OSError` if it
    cannot start."""
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None and not (number in TYPED and _in_foreground()):
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in PASSED_ON}
    try:
        process = subprocess.Popen([*command], env=dict(environment))
        for number in received:  # received between the two lines above
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


TYPED = (signal.SIGINT, signal.SIGQUIT)
"""Sent by a terminal to its whole foreground group, so also to the program."""


def _in_foreground() -> bool:
    """Whether the terminal's signals reach this process's group, so also the program."""
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


EVERY = 10.0
UNNOTICED = 1.5
"""Seconds that the main thread may leave a signal unhandled: a long call into MLX or BLAS delays
Python's handlers."""


class Progress:
    """Repeats the last report while nothing new is reported."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        """`tell` gets each line; `None`: the caller shows progress itself."""
        self._tell = tell
        self._began = time.monotonic()
        self._what = "running"

    def report(self, what: str) -> None:
        """`what`: what begins now, or a value that was measured."""
        self._what = what
        if self._tell is not None:
            self._tell(f"{time.monotonic() - self._began:5.0f} s  {what}")

    def repeat(self, every: float, done: threading.Event) -> None:
        while self._tell is not None and not done.wait(every):
            self._tell(f"{time.monotonic() - self._began:5.0f} s  ... {self._what}")


@contextmanager
def long_command(
    tell: Callable[[str], None] | None, *, every: float | None = None
) -> Iterator[Progress]:
    """Run the block in the main thread. Signals of `PASSED_ON` raise `Ended` there, once.

    Later signals are ignored, so that a second Ctrl-C does not interrupt the clean-up. If the main
    thread does not handle the first one, the process exits without a clean-up. `tell` gets lines of
    progress, one at least every `every` seconds (unset: `EVERY`)."""
    noticed, done = threading.Event(), threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        noticed.set()
        for each in PASSED_ON:
            signal.signal(each, signal.SIG_IGN)
        sys.stderr.write("\nending the servers that were started ...\n")
        raise Ended(number)

    received, sink = socket.socketpair()
    sink.setblocking(False)
    before = {number: signal.signal(number, end) for number in PASSED_ON}
    wakeup = signal.set_wakeup_fd(sink.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(received, noticed), daemon=True).start()
    progress = Progress(tell)
    threading.Thread(target=progress.repeat, args=(every or EVERY, done), daemon=True).start()
    try:
        yield progress
    finally:
        done.set()
        signal.set_wakeup_fd(wakeup)
        sink.close()
        if not noticed.is_set():  # otherwise the process is about to end
            for number, handler in before.items():
                signal.signal(number, handler)


def _watch(received: socket.socket, noticed: threading.Event) -> None:
    """Waits for a signal's number, which the interpreter writes when it arrives."""
    with received:
        while numbers := received.recv(1):
            if numbers[0] in PASSED_ON and not noticed.wait(UNNOTICED):
                os._exit(128 + numbers[0])
