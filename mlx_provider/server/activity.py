"""Counts attached clients and open requests, and the time since the last one left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import MLXProviderError
from ..protocol.event_queue import EventQueue
from ..protocol.events import Failed

UNREAD_TOTAL = 2**29
"""Most bytes of unread replies of all requests."""


class Activity:
    """Used only in the event loop."""

    def __init__(self) -> None:
        self._attached = 0
        self._open: set[EventQueue] = set()
        self._counting = 0
        self._since = time.monotonic()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Count a client while it holds its attach connection."""
        self._attached += 1
        try:
            yield
        finally:
            self._attached -= 1
            self._since = time.monotonic()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a body while it is read, which may take longer than the idle limit."""
        with self.attached():
            yield

    @contextmanager
    def serving(self, queue: EventQueue) -> Iterator[None]:
        """Count a request from its submission to its last byte."""
        self._open.add(queue)
        try:
            yield
        finally:
            self._open.discard(queue)
            self._since = time.monotonic()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request while its tokens are counted."""
        self._counting += 1
        try:
            yield
        finally:
            self._counting -= 1
            self._since = time.monotonic()

    @property
    def requests(self) -> int:
        """Requests that run or are counted."""
        return len(self._open) + self._counting

    @property
    def clients(self) -> int:
        """Clients that hold their attach connection."""
        return self._attached

    def idle(self) -> float:
        """Seconds without a client and without a request."""
        return 0.0 if self._attached or self.requests else time.monotonic() - self._since

    def relieve(self) -> None:
        """If readers leave too much unread, end the replies of the slowest ones."""
        unread = sum(queue.unread for queue in self._open)
        for queue in sorted(self._open, key=lambda queue: -queue.unread):
            if unread <= UNREAD_TOTAL:
                return
            unread -= queue.unread
            queue.give_up()

    def fail_open(self, error: MLXProviderError) -> None:
        """End every open request that has not ended yet."""
        for queue in self._open:
            queue.put([Failed.of(error)])
