"""Runs a program in the terminal's foreground and forwards signals to it. Before that, signals end
this process after its clean-ups."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
"""Sent by a terminal to its whole foreground group, so also to the program."""


class Ended(KeyboardInterrupt):
    """A signal, by its number, to end this process. Like Ctrl-C, it passes through handlers of
    errors of a request or a plugin."""


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def ending_by_signal(notice: str = "") -> Iterator[None]:
    """Signals that end a process raise `Ended` in the main thread, so that clean-ups of the block
    run, which ignore further signals, except SIGQUIT. After it: `SystemExit` with 128 plus the
    number of the signal."""

    def end(number: int, frame: FrameType | None) -> None:
        for signum in END_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # Ctrl-\ ends a clean-up that hangs
        os.write(2, notice.encode())  # `sys.stderr` may be in the middle of a write
        raise Ended(number)

    with _handling(end):
        try:
            yield
        except Ended as ended:
            raise SystemExit(128 + ended.args[0]) from None


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns the program's exit code, or 128 plus the signal that ended it. Signals that would end
    this process go to the program, which decides. Raises `OSError` if it cannot start."""
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        if process is None:
            received.append(number)
        elif not (number in TERMINAL_SIGNALS and _in_foreground()):
            process.send_signal(number)

    with _handling(hand_on):
        process = subprocess.Popen([*command], env=dict(environment))
        for number in received:  # received while it started
            process.send_signal(number)
        code = process.wait()
    return code if code >= 0 else 128 - code


def _in_foreground() -> bool:
    with suppress(OSError), Path("/dev/tty").open() as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
