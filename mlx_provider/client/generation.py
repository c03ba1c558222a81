"""The interface of an engine, in this process or elsewhere."""

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
    """An accepted request: read its events, or close it to cancel.

    `get` blocks a thread, `aget` suspends a task. Both return the events that arrived since the
    last call, and an empty list once `Done` or `Failed` has been read. Deleting the object also
    cancels the request.
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
        """Cancel the rest of the request. Idempotent, never blocks, safe from any thread."""
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
        """Number of tokens of the prompt that `submit` would use, see `serving.interface.Service`.

        Blocks and raises like `submit`.
        """

    def health(self) -> Health:
        """Raises `EngineUnavailable`."""

    def figures(self) -> Figures:
        """Live statistics. Starts no engine. Raises `EngineUnavailable`."""

    def close(self) -> None:
        """Disconnect from the engine. Running requests are cancelled."""
