"""The one interface to an engine, in this process or elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted, Event
from ..protocol.figures import Figures
from ..protocol.health import Health
from ..protocol.requests import GenerateRequest, ModelRequest
from .reply_events import ReplyEvents


class Generation:
    """A request that was accepted: read its events, or close it to cancel.

    Reading: `get` blocks a thread, `aget` suspends a task; both return the events that
    arrived since the last call, and an empty list once `Done` or `Failed` has been read.
    Dropping the object cancels the request, too.
    """

    def __init__(
        self, accepted: Accepted, events: EventQueue | ReplyEvents, cancel: Callable[[], None]
    ) -> None:
        self.accepted = accepted
        self._events = events
        self._finalizer = weakref.finalize(self, cancel)

    def get(self, timeout: float | None = None) -> list[Event]:
        """Wait at most `timeout` seconds for events; raises `RequestTimedOut` after that."""
        return self._events.get(timeout)

    async def aget(self, timeout: float | None = None) -> list[Event]:
        """`get` in an event loop."""
        return await self._events.aget(timeout)

    def close(self) -> None:
        """Cancel what is left of the request. Idempotent, never blocks, any thread."""
        if self._events.ended:
            self._finalizer.detach()
        self._finalizer()


class EngineClient(Protocol):
    """A connection to an engine. All methods are safe from any thread."""

    def submit(self, request: ModelRequest) -> Generation:
        """Send a request; block until it is accepted.

        Raises the engine's error (bad request, context too long, model not found, queue
        full ...) or `EngineUnavailable`. Loading a model may take minutes.
        """

    def count(self, request: GenerateRequest) -> int:
        """Tokens of the prompt that `submit` would make of it, see `serving.interface.Service`.

        Blocks and raises as `submit`.
        """

    def health(self) -> Health:
        """Raises `EngineUnavailable`."""

    def figures(self) -> Figures:
        """What the engine does now; starts none. Raises `EngineUnavailable`."""

    def close(self) -> None:
        """Let go of the engine; what runs is cancelled."""
