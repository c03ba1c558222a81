"""A command that takes minutes: it reports its progress, and a signal ends it quickly."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from .foreground import PASSED_ON, Ended

EVERY = 10.0
"""Seconds between two reports."""
UNNOTICED = 1.5
"""Seconds that the main thread may leave a signal unhandled. Python runs handlers between its own
instructions, so a long call into MLX or BLAS delays them."""
SHOWN = 4
"""Most functions that a report names."""


@contextmanager
def long_command(
    package: str, tell: Callable[[str], None] | None, *, every: float | None = None
) -> Iterator[None]:
    """Run the block in the main thread. Signals of `PASSED_ON` raise `Ended` there, once.

    Later signals are ignored, so that a second Ctrl-C does not interrupt the clean-up. If the main
    thread does not handle the first one, the process exits without a clean-up. `tell` gets one line
    every `every` seconds (unset: `EVERY`), with the running functions of `package`; `None`: the
    caller shows progress itself.
    """
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
    if tell is not None:
        threading.Thread(
            target=_pulse, args=(package, tell, every or EVERY, done), daemon=True
        ).start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(wakeup)
        sink.close()
        if not noticed.is_set():  # otherwise the process is about to end
            for number, handler in before.items():
                signal.signal(number, handler)


def _watch(received: socket.socket, noticed: threading.Event) -> None:
    """Wait for the number of a signal, which the interpreter writes when it arrives."""
    with received:
        while numbers := received.recv(1):
            if numbers[0] in PASSED_ON and not noticed.wait(UNNOTICED):
                os._exit(128 + numbers[0])


def _pulse(package: str, tell: Callable[[str], None], every: float, done: threading.Event) -> None:
    begun = time.monotonic()
    while not done.wait(every):
        tell(f"running for {time.monotonic() - begun:.0f} s: {_place(package)}")


def _place(package: str) -> str:
    """The innermost functions of the package in the main thread, outermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (documented)
    names: list[str] = []
    while frame is not None and len(names) < SHOWN:
        if str(frame.f_globals.get("__name__", "")).startswith(package):
            names.append(frame.f_code.co_name.strip("_<>"))
        frame = frame.f_back
    return " > ".join(reversed(names)) or "starting"
