"""A fair lock."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """First come, first served; `threading.Lock` usually goes to the thread that has just released
    it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._line: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._line.append(mine)
        mine.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._line:
                self._line.popleft().release()
            else:
                self._taken = False
