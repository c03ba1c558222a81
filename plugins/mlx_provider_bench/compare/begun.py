"""Streams that have begun: what comes beside them comes then."""

from __future__ import annotations

import threading
import time
from typing import TypeVar

T = TypeVar("T")


class Begun:
    """Counts the pieces of text of several streams. Safe from several threads.

    Which stream a piece is of is not told: `pieces` of each are about as many times the streams.
    """

    def __init__(self, streams: int, pieces: int = 2) -> None:
        self._left = streams * pieces
        self._lock = threading.Lock()
        self._enough = threading.Event()
        self.end = 0.0
        """When all of them had ended; 0: not yet."""

    def heard(self) -> bool:
        """Count one piece; the stream goes on."""
        with self._lock:
            self._left -= 1
            if self._left <= 0:
                self._enough.set()
        return True

    def ended(self, result: T) -> T:
        """All streams have ended, with or without text: whoever waits need not any longer."""
        self.end = time.perf_counter()
        self._enough.set()
        return result

    def wait(self, limit: float) -> float:
        """Return once they have begun, or the time is up; when that was."""
        self._enough.wait(limit)
        return time.perf_counter()
