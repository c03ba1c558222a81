"""A bound on the bytes that requests hold in memory at once."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack

from .errors import MLXProviderError


class ByteGate:
    """Grants bytes in the order of requests. Safe from any thread and event loop.

    More than the capacity is granted when nothing else is held, so that no request waits
    forever.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held = 0
        self._waiting: deque[Ticket] = deque()
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Granted bytes."""
        return self._held

    @property
    def waiting(self) -> int:
        """Number of waiting tickets."""
        return len(self._waiting)

    def ask(self, size: int, owner: str = "", *, first: bool = False) -> Ticket:
        """Queue a ticket for `size` bytes. The caller must close it in any case.

        first: before all others. Necessary if the caller already holds bytes; only one such
        caller may exist, because two would wait for each other.
        """
        ticket = Ticket(self, size, owner)
        with self._lock:
            self._waiting.insert(0 if first else len(self._waiting), ticket)
        self._grant()
        return ticket

    def refuse(self, error: MLXProviderError, owner: str | None = None) -> None:
        """Refuse the waiting tickets of one owner, or all, with an error."""
        with self._lock:
            refused = [t for t in self._waiting if owner is None or t.owner == owner]
            self._waiting = deque(t for t in self._waiting if t not in refused)
        for ticket in refused:
            if ticket.granted.set_running_or_notify_cancel():
                ticket.granted.set_exception(error)
        self._grant()

    def give_back(self, ticket: Ticket, size: int) -> None:
        """Free bytes of a granted ticket, or remove a waiting ticket."""
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
    """A request for bytes of a gate."""

    def __init__(self, gate: ByteGate, size: int, owner: str) -> None:
        self.size = size
        self.owner = owner
        self.granted: Future[None] = Future()
        self.charged = 0
        """Bytes that count against the gate now."""
        self._gate = gate
        self._closing = threading.Lock()

    def wait(self) -> Ticket:
        """Block until the bytes are granted. Raises the error of `refuse`."""
        self.granted.result()
        return self

    async def arrive(self) -> Ticket:
        """`wait` in an event loop. A cancellation removes the ticket."""
        with ExitStack() as undo:
            undo.callback(self.close)
            await asyncio.wrap_future(self.granted)
            undo.pop_all()
        return self

    def absorb(self, other: Ticket) -> None:
        """Take over the bytes of another granted ticket of the same gate."""
        with self._closing, other._closing:
            self.charged += other.charged
            self.size += other.size
            other.charged = 0

    def keep(self, size: int) -> None:
        """Free all bytes except `size`."""
        with self._closing:
            spare = max(0, self.charged - size)
            self.charged -= spare
        if spare:
            self._gate.give_back(self, spare)

    def close(self) -> None:
        """Free all bytes, or remove the waiting ticket. Idempotent."""
        with self._closing:
            spare, self.charged = self.charged, 0
        self._gate.give_back(self, spare)

    def __enter__(self) -> Ticket:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.close()
