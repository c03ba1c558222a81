"""The reply to one request."""

import weakref
from collections.abc import Callable
from contextvars import ContextVar

from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted, Event


class Generation:
    """An accepted request. `get` blocks a thread, `aget` suspends a task; both return the events
    since the last call, and an empty list once `Done` or `Failed` was read. Deleting the object
    cancels the request."""

    def __init__(self, accepted: Accepted, events: EventQueue, cancel: Callable[[], None]) -> None:
        self.accepted = accepted
        self.events = events
        self._finalizer = weakref.finalize(self, cancel)
        if (replies := REPLIES.get()) is not None:
            replies.append(weakref.ref(self))

    def get(self, timeout: float | None = None) -> list[Event]:
        """Raises `RequestTimedOut` after `timeout` seconds without events."""
        return self.events.get(timeout)

    async def aget(self, timeout: float | None = None) -> list[Event]:
        return await self.events.aget(timeout)

    def close(self) -> None:
        """Cancels the rest of the request. Idempotent, never blocks, safe from any thread."""
        if self.events.ended:
            self._finalizer.detach()
        self._finalizer()


REPLIES: ContextVar[list[weakref.ref[Generation]] | None] = ContextVar("replies", default=None)
"""Collects the replies that begin in a context."""
