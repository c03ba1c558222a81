"""A mailbox whose reader and writer share the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from ..protocol.event_queue import Mailbox
from ..protocol.messages import Event


class LoopMailbox(Mailbox):
    """Wakes its reader without a system call when `put` runs in the loop, as delivery does.

    A plain `Mailbox` wakes its reader's loop through a pipe, once per request and step. Made in
    the loop; `put` is still safe from any thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._arrived = asyncio.Event()

    def put(self, events: Iterable[Event]) -> None:
        """Add events and wake the reader."""
        super().put(events)
        if threading.get_ident() == self._loop_thread:
            self._arrived.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def next_events(self) -> list[Event]:
        """Every waiting event, after waiting for one; empty once the last was read."""
        # Checked again after a wake-up: one that a thread sent may come after its events were read.
        while not (self._events or self.ended):
            self._arrived.clear()
            await self._arrived.wait()
        return self.get(0)
