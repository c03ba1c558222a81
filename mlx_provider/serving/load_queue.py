"""Gives requests the models that they need, at once or after a wait in one queue for memory.

A request holds a model from before its prompt is rendered until its last event. The least recently
used idle model (without holds) leaves if another model, or rows of another, need its memory. Other
requests wait, oldest first, for a limited time. After `TURN` seconds, the first one reserves
models: these accept no new requests, so that one becomes idle.

No request waits forever: a hold states the bytes of its request's rows before the request is
queued, and weights never take the memory for the largest of them. So one queued request can always
run, and requests in the queue hold nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from math import inf
from typing import Generic, TypeVar

from ..errors import MLXProviderError, RequestFailed, RequestTimedOut, for_another
from .load_work import Line, LoadPlan, LoadWork, Ticket, in_use, too_large
from .residents import Hold, HoldsMemory, Leaving, MemoryLedger, Resident, Residents

TURN = 3.0
"""Seconds in the queue after which the first request reserves models that must leave."""
REST = 10.0
"""Seconds without use after which an idle model leaves so that more rows of others run at once."""

T = TypeVar("T", bound=HoldsMemory)


class LoadQueue(Generic[T]):
    """Safe from any thread. One lock covers everything; it is not held during a load."""

    def __init__(
        self,
        ledger: MemoryLedger,
        unload: Callable[[T], None],
        *,
        patience: float,
        turn: float = TURN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unload` blocks; `patience`: most seconds in the queue."""
        self._ledger = ledger
        self._patience = patience
        self._turn = turn
        self._clock = clock
        self._changed = threading.Condition()
        self._residents: Residents[T] = Residents(ledger, clock)
        self._line: Line[T] = Line()
        self._reserved: frozenset[Hashable] = frozenset()
        self._starved: set[Hashable] = set()
        """Models whose rows cannot continue while the weights of others are in memory."""
        self._work = LoadWork(self._residents, self._line, self._changed, self._advance, unload)
        self._expiry: threading.Timer | None = None
        self._closed: MLXProviderError | None = None

    # -- holds

    def acquire(
        self,
        key: Hashable,
        plan: Callable[[], LoadPlan[T]],
        *,
        who: str = "",
        rows: int = 0,
        keep_alive: float | None = None,
        since: float | None = None,
        deadline: float = inf,
    ) -> Hold[T]:
        """The model, loaded if necessary, and `rows` bytes beside all weights (blocks).

        `keep_alive`: see `KeepAlive`. `since`: arrival, which sets its place in the queue. Raises
        the errors of `plan` and of the load, `LoadFailed` for a model that never fits,
        `MemoryInUse` after the longest wait."""
        with self._changed:
            if (hold := self._at_once(key, rows, keep_alive)) is not None:
                return hold
        made = plan()
        if made.nbytes > self._ledger.limit:
            raise too_large(made.name, made.nbytes, self._ledger.limit)
        now = self._clock()
        came = now if since is None else since
        until = now + self._patience
        ticket = Ticket(who, key, made, rows, keep_alive, came, until, deadline)
        with self._changed:
            self._line.join(ticket)
            try:
                self._advance()
                return self._wait(ticket)
            except BaseException:
                if ticket.hold is not None:
                    ticket.hold.release()
                raise
            finally:
                if self._line.leave(ticket):
                    self._advance()

    def covers(self, hold: Hold[T], rows: int) -> bool:
        """Whether so many bytes for rows fit beside all weights. If so, they are reserved."""
        with self._changed:
            if rows > self._ledger.free:
                return False
            hold.rows = rows
            return True

    def withdraw(self, who: str) -> None:
        with self._changed:
            gone = [ticket for ticket in self._line if ticket.who == who]
            if gone:
                self._line.refuse(gone, RequestFailed.cancelled())
                self._changed.notify_all()
                self._advance()

    def _released(self, hold: Hold[T]) -> None:
        with self._changed:
            resident = self._residents.release(hold)
            if resident is None:
                return
            if not resident.holds:
                self._starved.discard(hold.key)
                self._await_expiry()
            if self._line:
                self._advance()

    # -- for the engine thread

    def make_way(self, key: Hashable, rows: int, others: int, *, stuck: bool) -> Leaving[T]:
        """Idle models to unload, so that rows of `key` have `rows` bytes and others `others`. The
        caller unloads them, then calls `left`.

        If running rows will free memory at their end, only models unused for `REST` seconds leave.
        `stuck`: no row of `key` runs; if no idle model helps, the other models accept no new
        requests."""
        with self._changed:
            free = self._ledger.free
            need = rows + others - free
            never = stuck and rows > free  # unless a model leaves
            rested = inf if never else self._clock() - REST
            idle = self._residents.idle(need, key, rested)
            leaving = self._residents.detach(idle or ())
            if idle is None and stuck:
                self._starved.add(key)
            elif key in self._starved:
                self._starved.remove(key)
                self._advance()
            return leaving

    def left(self, resident: Resident[T]) -> None:
        self._work.left(resident)

    def grown(self, key: Hashable) -> None:
        with self._changed:
            resident = self._residents.get(key)
            if resident is not None and resident.model is not None:
                self._ledger.correct(key, resident.model)

    def others_go_on(self, key: Hashable) -> bool:
        """Whether requests of other models will end without memory of `key`."""
        with self._changed:
            return any(
                each.holds
                for each in self._residents
                if each.key != key and each.key not in self._starved
            )

    def models(self) -> list[T]:
        with self._changed:
            return [model for _, model in self._residents.usable()]

    def forget(self) -> list[T]:
        """Remove all models after the death of the engine thread. Returns those that could be
        used."""
        with self._changed:
            self._work.generation += 1
            gone = self._residents.detach(self._residents)
            for resident, _ in gone:
                self._residents.remove(resident)
            self._starved.clear()
            self._advance()
        return [model for _, model in gone]

    def close(self, error: MLXProviderError) -> None:
        with self._changed:
            self._closed = error
            self._line.refuse(self._line, error)
            self._changed.notify_all()
            if self._expiry is not None:
                self._expiry.cancel()

    # -- the queue (under the lock)

    def _at_once(self, key: Hashable, rows: int, keep_alive: float | None) -> Hold[T] | None:
        if self._closed is not None:
            raise for_another(self._closed)
        resident = self._residents.get(key)
        if resident is None or resident.model is None or not self._open(key, rows):
            return None
        resident.keep_alive.ask(keep_alive)
        return self._residents.hold(resident, resident.model, rows, self._released)

    def _open(self, key: Hashable, rows: int) -> bool:
        closed = key in self._reserved or self._others_starve(key)
        return not closed and rows <= self._ledger.free

    def _others_starve(self, key: Hashable) -> bool:
        return bool(self._starved) and key not in self._starved

    def _wait(self, ticket: Ticket[T]) -> Hold[T]:
        while ticket.hold is None:
            if ticket.error is not None:
                raise for_another(ticket.error)
            now = self._clock()
            if now >= ticket.deadline:
                raise RequestTimedOut("the request's time limit has passed")
            if now >= ticket.until and self._work.key != ticket.key:
                raise in_use(ticket, self._residents)
            self._changed.wait(ticket.pause(now, self._turn))
            if self._line.first is ticket:
                self._advance()
        return ticket.hold

    def _advance(self) -> None:
        """Serve the requests that can be served, and free memory for the first other one."""
        first: Ticket[T] | None = None
        self._reserved = frozenset()
        for ticket in self._line:
            hold = (
                None if self._closed else self._at_once(ticket.key, ticket.rows, ticket.keep_alive)
            )
            if hold is not None:
                ticket.hold = hold
                self._line.leave(ticket)
                self._changed.notify_all()
            elif first is None:
                first = ticket
                self._reserved = ticket.reserved = self._to_reserve(ticket)
        if first is not None and self._work.key is None:
            self._make_room(first)

    def _to_reserve(self, ticket: Ticket[T]) -> frozenset[Hashable]:
        if self._clock() < ticket.since + self._turn:
            return frozenset()
        return self._residents.to_reserve(self._lack(ticket), ticket.key, ticket.reserved)

    def _lack(self, ticket: Ticket[T]) -> int:
        if ticket.key in self._residents:
            return ticket.rows - self._ledger.free
        return ticket.plan.nbytes + max(ticket.rows, self._residents.rows()) - self._ledger.free

    def _make_room(self, ticket: Ticket[T]) -> None:
        if self._others_starve(ticket.key):
            return
        resident = self._residents.get(ticket.key)
        if resident is not None and resident.model is None:
            return  # it is leaving
        leaving = self._residents.idle(self._lack(ticket), ticket.key)
        if leaving is None or not (resident is None or leaving):
            return
        if resident is None:
            self._residents.expect(ticket.key, ticket.plan.nbytes)
        plan = ticket.plan if resident is None else None
        self._work.start(self._residents.detach(leaving), ticket.key, plan)

    def _await_expiry(self) -> None:
        soonest = self._residents.next_expiry()
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = None
        if soonest < inf and self._closed is None:
            self._expiry = threading.Timer(max(0.0, soonest - self._clock()), self._expire)
            self._expiry.daemon = True
            self._expiry.start()

    def _expire(self) -> None:
        with self._changed:
            leaving = self._residents.detach(self._residents.expired())
            self._await_expiry()
        self._work.leave(leaving)
