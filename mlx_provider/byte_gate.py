"""Limits the bytes that all requests use at once, with equal shares for the owners of requests."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from .errors import MLXProviderError


class ByteGate:
    """Grants bytes to tickets. Each owner of open tickets (a name, such as a tenant) gets an equal
    share of `capacity` and waits only for its own tickets. Its oldest ticket never waits, however
    large it is, so the sum can exceed `capacity`. Safe from any thread and event loop."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._owners: dict[str, _Owner] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are granted now, to all owners."""
        with self._lock:
            return sum(owner.nbytes for owner in self._owners.values())

    def count_waiting(self, owner: str = "") -> int:
        with self._lock:
            return len(self._owners[owner].waiting) if owner in self._owners else 0

    def ask(self, size: int, owner: str = "", who: str = "") -> Ticket:
        """Return a ticket for `size` bytes (or uses, if those are counted). The caller must `wait`
        for it, and close it in any case. `who`: the request, for `refuse`."""
        ticket = Ticket(self, owner, who)
        with self._lock:
            self._owners.setdefault(owner, _Owner()).tickets[ticket] = None
        self.resize(ticket, size)
        return ticket

    def resize(self, ticket: Ticket, size: int) -> None:
        """Queue a ticket for more bytes, or free some of its bytes now. Ignores a closed ticket."""
        with self._lock:
            owner = self._owners.get(ticket.owner)
            if owner is None or ticket not in owner.tickets:
                return
            ticket.size = size
            owner.charge(ticket, min(size, ticket.charged))
            if size > ticket.charged or not ticket.granted.done():  # it has to wait
                ticket.granted = Future()
                owner.waiting[ticket] = None
        self._grant()

    def refuse(self, error: MLXProviderError, who: str | None = None) -> None:
        """Raise `error` where tickets are waited for: those of the request `who`, or all."""
        with self._lock:
            waiting = [ticket for owner in self._owners.values() for ticket in owner.waiting]
            refused = [ticket for ticket in waiting if who is None or ticket.who == who]
            for ticket in refused:
                del self._owners[ticket.owner].waiting[ticket]
        for ticket in refused:
            if ticket.granted.set_running_or_notify_cancel():
                ticket.granted.set_exception(error)
        self._grant()

    def close(self, ticket: Ticket) -> None:
        """Free the ticket's bytes, or remove it from the queue. A second call does nothing."""
        with self._lock:
            owner = self._owners.get(ticket.owner)
            if owner is None or ticket not in owner.tickets:
                return
            owner.charge(ticket, 0)
            del owner.tickets[ticket]
            owner.waiting.pop(ticket, None)
            if not owner.tickets:
                del self._owners[ticket.owner]
        self._grant()

    def _grant(self) -> None:
        with self._lock:
            share = self._capacity // max(1, len(self._owners))
            granted = [future for owner in self._owners.values() for future in owner.grant(share)]
        for future in granted:
            if future.set_running_or_notify_cancel():
                future.set_result(None)


@dataclass(eq=False)
class _Owner:
    tickets: dict[Ticket, None] = field(default_factory=dict)
    waiting: dict[Ticket, None] = field(default_factory=dict)
    nbytes: int = 0

    def charge(self, ticket: Ticket, size: int) -> None:
        self.nbytes += size - ticket.charged
        ticket.charged = size

    def grant(self, share: int) -> list[Future[None]]:
        """Charge the tickets that need not wait, and return their futures."""
        granted = []
        while self.waiting:
            ticket = next(iter(self.waiting))
            if self.nbytes + ticket.size - ticket.charged > share:
                ticket = next(iter(self.tickets))  # the oldest never waits
                if ticket not in self.waiting:
                    break
            del self.waiting[ticket]
            self.charge(ticket, ticket.size)
            granted.append(ticket.granted)
        return granted


class Ticket:
    """Bytes for one use. A `with` block waits for them, and closes the ticket at its end."""

    def __init__(self, gate: ByteGate, owner: str, who: str) -> None:
        self.owner = owner
        self.who = who
        self.size = 0  # bytes that it asks for
        self.charged = 0  # bytes that are granted now
        self.granted: Future[None] = Future()
        self.gate = gate

    def wait(self) -> Ticket:
        """Block until the bytes are granted. Raises the error of `refuse`, and then closes it."""
        try:
            self.granted.result()
        except BaseException:  # Ctrl-C, too
            self.close()
            raise
        return self

    async def arrive(self) -> Ticket:
        """Like `wait`, in an event loop. A cancellation closes the ticket, too."""
        try:
            await asyncio.wrap_future(self.granted)
        except BaseException:  # a cancellation, too
            self.close()
            raise
        return self

    async def grow(self, size: int) -> Ticket:
        """Ask for `size` bytes in all, and wait like `arrive`."""
        self.gate.resize(self, size)
        return await self.arrive()

    def shrink(self, size: int) -> None:
        """Free all bytes except `size`."""
        if size < self.charged:
            self.gate.resize(self, size)

    def close(self) -> None:
        self.gate.close(self)

    def __enter__(self) -> Ticket:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.close()
