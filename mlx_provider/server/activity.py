"""Counts attached clients and open requests, and the time since the last one left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import MLXProviderError
from ..protocol.event_queue import EventQueue
from ..protocol.events import Failed

UNREAD_TOTAL = 2**29
"""Bytes of unread replies of all requests."""


class Activity:
    """Used only in the event loop."""

    def __init__(self) -> None:
        self._attached = 0
        self._open: dict[EventQueue, str] = {}
        self._counting = 0
        self._since = time.monotonic()

    @contextmanager
    def attached(self) -> Iterator[None]:
        self._attached += 1
        try:
            yield
        finally:
            self._attached -= 1
            self._since = time.monotonic()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a body while it is read: that may take longer than the idle limit."""
        with self.attached():
            yield

    @contextmanager
    def serving(self, queue: EventQueue, owner: str = "") -> Iterator[None]:
        self._open[queue] = owner
        try:
            yield
        finally:
            self._open.pop(queue, None)
            self._since = time.monotonic()

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._counting += 1
        try:
            yield
        finally:
            self._counting -= 1
            self._since = time.monotonic()

    @property
    def requests(self) -> int:
        return len(self._open) + self._counting

    @property
    def clients(self) -> int:
        return self._attached

    def idle(self) -> float:
        return 0.0 if self._attached or self.requests else time.monotonic() - self._since

    def relieve(self) -> None:
        """If readers leave too much unread, end the slowest reply of the owner with the most."""
        unread = Counter[str]()
        for queue, owner in self._open.items():
            unread[owner] += queue.unread
        slowest = sorted(self._open, key=lambda queue: queue.unread)
        while unread.total() > UNREAD_TOTAL:
            [(most, _)] = unread.most_common(1)
            queue = next(each for each in reversed(slowest) if self._open[each] == most)
            slowest.remove(queue)
            unread[most] -= queue.unread
            queue.give_up()

    def fail_open(self, error: MLXProviderError) -> None:
        for queue in self._open:
            queue.put([Failed.of(error)])
