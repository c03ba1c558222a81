"""Waits until streams have begun, for what must come beside them."""

from __future__ import annotations

import threading
import time
from typing import TypeVar

T = TypeVar("T")


class Begun:
    """Counts the pieces of text of several streams. Safe from several threads.

    It does not know the stream of a piece: it waits for `pieces` times the number of streams.
    """

    def __init__(self, streams: int, pieces: int = 2) -> None:
        self._left = streams * pieces
        self._lock = threading.Lock()
        self._enough = threading.Event()
        self.end = 0.0
        """When all of them had ended; 0: not yet."""

    def heard(self) -> bool:
        """Count one piece of a stream."""
        with self._lock:
            self._left -= 1
            if self._left <= 0:
                self._enough.set()
        return True

    def ended(self, result: T) -> T:
        """All streams have ended, with or without text: end the wait."""
        self.end = time.perf_counter()
        self._enough.set()
        return result

    def wait(self, limit: float) -> float:
        """Wait until they have begun, or the time is up. Returns that time."""
        self._enough.wait(limit)
        return time.perf_counter()
