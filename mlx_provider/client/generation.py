"""The interface of an engine, and the reply to one request."""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted, Event
from ..protocol.health import Health, Stats
from ..protocol.requests import GenerateRequest, ModelRequest


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


class EngineClient(Protocol):
    """Methods raise the engine's error, or `EngineUnavailable`."""

    def submit(self, request: ModelRequest) -> Generation:
        """Block until the request is accepted; loading a model may take minutes."""

    def count(self, request: GenerateRequest) -> int:
        """Tokens of the prompt that `submit` would use; a lower limit if that exceeds the context.
        Blocks like `submit`."""

    def health(self) -> Health: ...

    def stats(self) -> Stats: ...

    def close(self) -> None:
        """Cancels running requests."""
