"""A bound on the bytes that requests hold in memory at once."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack

from .errors import MLXProviderError


class ByteGate:
    """Grants bytes first come, first served. Any thread, and event loops.

    What is asked for beyond the capacity is granted once nothing else is held, so that nobody
    waits for ever.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held = 0
        self._waiting: deque[Ticket] = deque()
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes that are granted."""
        return self._held

    @property
    def waiting(self) -> int:
        """Tickets in the line."""
        return len(self._waiting)

    def ask(self, size: int, owner: str = "", *, first: bool = False) -> Ticket:
        """Stand in line for `size` bytes; to be closed in any case.

        first: before all others. Who holds bytes while it waits must be, and the only one that
        does: else two of them wait for each other.
        """
        ticket = Ticket(self, size, owner)
        with self._lock:
            self._waiting.insert(0 if first else len(self._waiting), ticket)
        self._grant()
        return ticket

    def refuse(self, error: MLXProviderError, owner: str | None = None) -> None:
        """End the waiting of one owner, or of everyone, with an error."""
        with self._lock:
            refused = [t for t in self._waiting if owner is None or t.owner == owner]
            self._waiting = deque(t for t in self._waiting if t not in refused)
        for ticket in refused:
            if ticket.granted.set_running_or_notify_cancel():
                ticket.granted.set_exception(error)
        self._grant()

    def give_back(self, ticket: Ticket, size: int) -> None:
        """Bytes of a granted ticket are free again, or a ticket leaves the line."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                size = 0
            self._held -= size
        self._grant()

    def _grant(self) -> None:
        with self._lock:
            granted = []
            while self._waiting and self._fits(self._waiting[0].size):
                ticket = self._waiting.popleft()
                ticket.charged = ticket.size
                self._held += ticket.size
                granted.append(ticket)
        for ticket in granted:
            if ticket.granted.set_running_or_notify_cancel():
                ticket.granted.set_result(None)

    def _fits(self, size: int) -> bool:
        return self._held == 0 or self._held + size <= self._capacity


class Ticket:
    """A claim on bytes of a gate."""

    def __init__(self, gate: ByteGate, size: int, owner: str) -> None:
        self.size = size
        self.owner = owner
        self.granted: Future[None] = Future()
        self.charged = 0
        """Bytes that count against the gate now."""
        self._gate = gate
        self._closing = threading.Lock()

    def wait(self) -> Ticket:
        """Block until the bytes are granted. Raises what the gate refuses with."""
        self.granted.result()
        return self

    async def arrive(self) -> Ticket:
        """`wait` in an event loop; cancelling it leaves the line."""
        with ExitStack() as undo:
            undo.callback(self.close)
            await asyncio.wrap_future(self.granted)
            undo.pop_all()
        return self

    def absorb(self, other: Ticket) -> None:
        """Take over what another granted ticket of the same gate holds."""
        with self._closing, other._closing:
            self.charged += other.charged
            self.size += other.size
            other.charged = 0

    def keep(self, size: int) -> None:
        """Give back all but `size` of the bytes."""
        with self._closing:
            spare = max(0, self.charged - size)
            self.charged -= spare
        if spare:
            self._gate.give_back(self, spare)

    def close(self) -> None:
        """Give everything back, or leave the line. Idempotent."""
        with self._closing:
            spare, self.charged = self.charged, 0
        self._gate.give_back(self, spare)

    def __enter__(self) -> Ticket:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.close()
