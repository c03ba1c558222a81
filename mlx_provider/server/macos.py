"""macOS: no idle sleep during requests, and memory pressure.

Nothing here has run on a Mac; the calls follow Apple's documentation."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CAFFEINATE = Path("/usr/bin/caffeinate")
PRESSURE = b"kern.memorystatus_vm_pressure_level"
NORMAL, CRITICAL = 1, 4
"""Levels of `PRESSURE`; 2 is a warning."""
AGAIN_SECONDS = 10.0


class StayAwake:
    def __init__(self, program: Path = CAFFEINATE) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    def update(self, *, busy: bool) -> None:
        """The assertion also ends with this process (`-w`). A program that has ended by itself is
        started again."""
        running = self._process is not None and self._process.poll() is None
        if busy and not running and self._program.exists():
            command = [os.fspath(self._program), "-i", "-w", str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        elif not busy and self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


class MemoryPressure:
    def __init__(
        self,
        level: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._level = level or pressure_level
        self._clock = clock
        self._next = 0.0

    def share_to_keep(self) -> float | None:
        """`None`: keep all."""
        level = self._level()
        if level <= NORMAL:
            self._next = 0.0
            return None
        if self._clock() < self._next:
            return None
        self._next = self._clock() + AGAIN_SECONDS
        return 0.0 if level >= CRITICAL else 0.5


def pressure_level() -> int:
    """`NORMAL` if the system reports none."""
    if sys.platform != "darwin":
        return NORMAL
    found = ctypes.c_int(NORMAL)
    size = ctypes.c_size_t(ctypes.sizeof(found))
    libc = ctypes.CDLL(None)
    failed = libc.sysctlbyname(PRESSURE, ctypes.byref(found), ctypes.byref(size), None, 0)
    return NORMAL if failed else found.value
