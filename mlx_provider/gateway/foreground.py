"""Runs a program in the terminal's foreground, and handles signals: before the program starts, they
end this process after its clean-ups; then they go to the program."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)  # a terminal sends them to the program, too


class Ended(KeyboardInterrupt):
    """A signal, by its number, is to end this process. Handlers of errors do not catch it."""


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as by `nohup`: it stays so
    numbers = [n for n in END_SIGNALS if not (is_ignored and n == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def ending_by_signal(notice: str = "") -> Iterator[None]:
    """In the block, the first signal that ends a process writes `notice` to stderr and raises
    `Ended` in the main thread, so that clean-ups run. They ignore further signals, except SIGQUIT.
    After the block, this becomes `SystemExit` with 128 plus the number of the signal."""

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
    """Run a program. Returns its exit code, or 128 plus the signal that ended it. Signals to end
    this process go to the program instead. Raises `OSError` if it cannot start."""
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
