"""Keeps a group of ranks running: launches it, ends it in order, restarts it after a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from .launching import GroupOptions, child_environment, launch_command
from .messages import RankFault
from .report import Report

BACK_OFF = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before each restart; the last one again and again."""
FORGIVEN = 60.0
"""Seconds of service after which the next fault counts as the first."""
GIVE_UP = 5
"""Failures in a row, where the group has never served."""
START_LIMIT = 900.0
"""Seconds until a group must serve."""
LEAVE_LIMIT = 8.0
"""Seconds in which every rank of a lost group ends by itself; who hangs is killed then."""
LEADER_LIMIT = 1.0
"""Seconds in which rank 0, which another rank takes for lost, says why, if it can; else it is
killed, and its clients' connections end with it."""
STOP_LIMIT = 15.0
"""Seconds to end in order, beside those that requests are given."""
BEAT = 1.0
OUTPUT_LIMIT = 1.0
"""Seconds for the last lines of an ended group."""
TICK = 0.05
USAGE = 2
"""Exit code of `mlx.launch` for options that it does not take."""


@dataclass
class Attempt:
    """One group from its launch to its end, from the reports of its ranks. For two threads."""

    served_at: float | None = None
    fault: RankFault | None = None
    failure: str = ""
    refusal: str = ""
    leaving: float | None = None
    """Monotonic time at which its end was ordered."""
    _told_by_leader: bool = field(default=False, repr=False)

    def take(self, report: Report) -> None:
        """Record a report. The first fault counts; the leader's has precedence over a
        follower's."""
        if report.kind == "serving":
            self.served_at = time.monotonic()
            return
        self.leaving = self.leaving or time.monotonic()
        if report.kind == "refused":
            self.refusal = self.refusal or report.message
        elif report.kind == "failed":
            self.failure = self.failure or report.message
        elif self.fault is None or (report.rank == 0 and not self._told_by_leader):
            self.fault = report.fault
            self._told_by_leader = report.rank == 0

    @property
    def limit(self) -> float:
        """Seconds to end, from `leaving`."""
        gone = self.fault is not None and self.fault.rank == 0 and not self._told_by_leader
        return LEADER_LIMIT if gone else LEAVE_LIMIT

    def why(self) -> str:
        if self.fault is not None:
            return self.fault.error().message
        return self.failure or "its ranks ended without a word: see the lines above"


class Supervisor:
    """Runs groups one after the other. Call `run` in the main thread, which gets the signals."""

    def __init__(
        self,
        command: Callable[[RankFault | None], list[str]],
        drain: float = 0.0,
        back_off: Sequence[float] = BACK_OFF,
    ) -> None:
        """`command`: launches a group, with the fault of the group before."""
        self._command = command
        self._drain = drain
        self._back_off = back_off
        self._signals = 0

    def run(self) -> int:
        """Run until it is stopped, or a restart cannot help. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        failures, ever, fault = 0, False, None
        while True:
            attempt, code = self._attempt(fault)
            if self._signals:
                return 0
            if attempt.refusal or code == USAGE:
                return _given_up(attempt.refusal or "mlx.launch does not take these options")
            served = attempt.served_at
            ever = ever or served is not None
            lasted = served is not None and time.monotonic() - served >= FORGIVEN
            failures = 1 if lasted else failures + 1
            fault = attempt.fault or fault
            if not ever and failures >= GIVE_UP:
                return _given_up(f"{failures} starts have failed: {attempt.why()}")
            pause = self._back_off[min(failures, len(self._back_off)) - 1]
            _say(f"{attempt.why()}; the group restarts in {pause:g} s")
            self._sleep(pause)
            if self._signals:
                return 0

    def _signalled(self, *signalled: object) -> None:
        self._signals += 1

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._signals and time.monotonic() < deadline:
            time.sleep(TICK)

    def _attempt(self, fault: RankFault | None) -> tuple[Attempt, int | None]:
        attempt = Attempt()
        # A new session: only the supervisor gets the terminal's signals, and all processes of the
        # group on this machine can be killed together.
        process = subprocess.Popen(
            self._command(fault),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
        )
        reader = threading.Thread(target=_read, args=(process, attempt), daemon=True)
        reader.start()
        try:
            self._accompany(process, attempt)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        _close(process, reader)
        return attempt, code

    def _accompany(self, process: subprocess.Popen[bytes], attempt: Attempt) -> None:
        """Wait until the group has ended or must be killed."""
        begun = time.monotonic()
        reported, next_beat = 0, 0.0
        while process.poll() is None:
            now = time.monotonic()
            if reported < self._signals:
                reported += 1
                attempt.leaving = now + self._drain + STOP_LIMIT - LEAVE_LIMIT
                _write(process, b"stop\n")
            if now >= next_beat:
                next_beat = now + BEAT
                _write(process, b"\n")
            if attempt.leaving is not None and now > attempt.leaving + attempt.limit:
                return
            if attempt.served_at is None and now > begun + START_LIMIT:
                attempt.failure = f"it did not serve within {START_LIMIT:g} s"
                return
            time.sleep(TICK)


def supervise(options: GroupOptions, serve: Sequence[str], drain: float = 0.0) -> int:
    """Run a group of engine servers with these arguments of `serve`. Raises `BadRequest`."""
    options.check()
    launch_command(options, serve)  # reports errors of the options at once
    return Supervisor(lambda fault: launch_command(options, serve, fault), drain).run()


def _read(process: subprocess.Popen[bytes], attempt: Attempt) -> None:
    """Pass reports to the attempt, and all other output to stderr."""
    assert process.stdout is not None  # noqa: S101
    for line in process.stdout:
        report = Report.read(line.strip())
        if report is not None:
            attempt.take(report)
        else:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


def _close(process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
    """Close the pipes after the end of all writers."""
    assert process.stdin is not None  # noqa: S101
    assert process.stdout is not None  # noqa: S101
    with suppress(OSError):  # data that it did not read
        process.stdin.close()
    reader.join(OUTPUT_LIMIT)
    if not reader.is_alive():
        process.stdout.close()


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None  # noqa: S101
    with suppress(OSError, ValueError):
        process.stdin.write(line)
        process.stdin.flush()


def _given_up(why: str) -> int:
    _say(why)
    return 1


def _say(line: str) -> None:
    sys.stderr.write(f"mlx-provider: {line}\n")
    sys.stderr.flush()
