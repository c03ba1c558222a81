"""A mailbox that makes the connection wait for its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..protocol.event_queue import Mailbox
from ..protocol.messages import Event

PAUSE_ABOVE = 2**20
"""Unread bytes above which nothing more is read from the engine's connection.

Far above what a step brings, so that a reader of ordinary speed never meets it.
"""


class PacedMailbox(Mailbox):
    """Written in one event loop by a task that awaits `room` between two batches.

    A reader that stops thus stops the engine's connection, and the engine itself joins, or ends,
    what piles up there. Holds `PAUSE_ABOVE` bytes and one batch.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], None]) -> None:
        """`soon` has a function called in the writer's loop, from any thread."""
        super().__init__()
        self._soon = soon
        self._room = asyncio.Event()
        self._waits = False

    async def room(self) -> None:
        """Wait until the reader has taken enough, or the last event has arrived."""
        while self._full():
            await self._room.wait()

    def _full(self) -> bool:
        with self._lock:
            self._waits = self._unread > PAUSE_ABOVE and not self._ended
            if self._waits:
                self._room.clear()
            return self._waits

    def _take(self) -> list[Event]:
        events = super()._take()
        if self._waits:
            self._waits = False
            self._soon(self._room.set)
        return events
