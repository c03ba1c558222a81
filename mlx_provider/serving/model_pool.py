"""Which models are in memory: who uses them, who waits for room, and who makes it.

A request holds a `Lease` from before its prompt is rendered until its last event. A model without
leases is idle; the longest unused one leaves when another model, or rows of another, need its
room. Whoever finds no room stands in one line, oldest first, for a bounded while. The first in
line that has waited for its turn has models closed to newcomers, so that one of them gets idle.

Why nobody waits for ever: a lease tells the bytes of its request's rows before the request is
queued, and weights never take what the largest of them needs. So of the requests that are queued
one can always run, and those in line hold nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, Protocol, TypeVar

from ..errors import (
    EngineDied,
    LoadFailed,
    MemoryInUse,
    MLXProviderError,
    RequestFailed,
    RequestTimedOut,
    for_another,
)
from .stay import Stay
from .weight_account import WeightAccount

log = logging.getLogger(__name__)

TURN = 3.0
"""Seconds after which the first in line keeps newcomers from the models that are to make room."""
REST = 10.0
"""Seconds without use after which an idle model leaves so that more rows of others run at once."""
RETRY_AFTER = 5.0
"""Seconds that a refused request is told to stay away."""


class Weights(Protocol):
    """What the pool asks of a model in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in truth."""

    @property
    def live_bytes(self) -> int:
        """Bytes set aside for the rows that run on it."""


T = TypeVar("T", bound=Weights)


@dataclass(frozen=True)
class Plan(Generic[T]):
    """How a model that is not here would come."""

    name: str
    nbytes: int
    """Bytes that it is expected to take."""
    load: Callable[[], T]
    """Blocks; raises errors of `mlx_provider.errors`."""


@dataclass(eq=False)
class Lease(Generic[T]):
    """A request's hold on a model: it stays in memory until `release`."""

    model: T
    key: Hashable
    rows: int
    """Bytes for its rows that weights must leave."""
    _given_back: Callable[[Lease[T]], None] = field(repr=False)

    def release(self) -> None:
        """Idempotent; any thread."""
        self._given_back(self)


@dataclass(eq=False)
class Resident(Generic[T]):
    key: Hashable
    used: float
    model: T | None = None
    """`None` while it loads, and while it leaves."""
    leases: set[Lease[T]] = field(default_factory=set)
    stay: Stay = field(default_factory=Stay)


@dataclass(eq=False)
class _Ticket(Generic[T]):
    """A place in line."""

    who: str
    key: Hashable
    plan: Plan[T]
    rows: int
    keep_alive: float | None
    since: float
    until: float
    """When it has waited long enough, unless its own model is on its way."""
    deadline: float
    lease: Lease[T] | None = None
    error: MLXProviderError | None = None
    claims: frozenset[Hashable] = frozenset()
    """Models that are to get idle for it."""


Leaving = list[tuple[Resident[T], T]]


class ModelPool(Generic[T]):
    """Safe from any thread; one lock for all of it, which is not held while anything loads."""

    def __init__(
        self,
        account: WeightAccount,
        unload: Callable[[T], None],
        *,
        patience: float,
        turn: float = TURN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unload` blocks; `patience`: seconds in line."""
        self._account = account
        self._unload = unload
        self._patience = patience
        self._turn = turn
        self._clock = clock
        self._changed = threading.Condition()
        self._residents: dict[Hashable, Resident[T]] = {}
        self._line: list[_Ticket[T]] = []
        self._claimed: frozenset[Hashable] = frozenset()
        self._hungry: set[Hashable] = set()
        """Models none of whose rows can go on beside the weights of others."""
        self._working_for: Hashable | None = None
        """Models leave for this one, and it loads: one such work at a time."""
        self._generation = 0
        self._expiry: threading.Timer | None = None
        """Until the first idle model has stayed long enough."""
        self._closed: MLXProviderError | None = None

    # -- leases

    def acquire(
        self,
        key: Hashable,
        plan: Callable[[], Plan[T]],
        *,
        who: str = "",
        rows: int = 0,
        keep_alive: float | None = None,
        since: float | None = None,
        deadline: float = inf,
    ) -> Lease[T]:
        """The model, loaded if need be, and `rows` bytes beside all weights (blocks).

        `keep_alive`: how long it shall stay from then on, see `Stay`. `since`: when the request
        came, its place in line. `deadline`: its own end. Raises what `plan` and loading raise,
        `LoadFailed` for what fits in no case, `MemoryInUse` after waiting in vain.
        """
        with self._changed:
            if (lease := self._at_once(key, rows, keep_alive)) is not None:
                return lease
        made = plan()
        if made.nbytes > self._account.limit:
            raise _too_large(made.name, made.nbytes, self._account.limit)
        now = self._clock()
        came = now if since is None else since
        until = now + self._patience
        ticket = _Ticket(who, key, made, rows, keep_alive, came, until, deadline)
        with self._changed:
            insort(self._line, ticket, key=lambda each: each.since)
            try:
                self._advance()
                return self._served(ticket)
            except BaseException:
                if ticket.lease is not None:
                    ticket.lease.release()
                raise
            finally:
                if ticket in self._line:
                    self._line.remove(ticket)
                    self._advance()

    def covers(self, lease: Lease[T], rows: int) -> bool:
        """Whether so many bytes for rows fit beside all weights; they will from then on."""
        with self._changed:
            if rows > self._account.free:
                return False
            lease.rows = rows
            return True

    def withdraw(self, who: str) -> None:
        """Whoever is in line by this name has left."""
        with self._changed:
            gone = [ticket for ticket in self._line if ticket.who == who]
            if gone:
                self._refuse(gone, RequestFailed.cancelled())
                self._advance()

    def _released(self, lease: Lease[T]) -> None:
        with self._changed:
            resident = self._residents.get(lease.key)
            if resident is None or lease not in resident.leases:
                return
            resident.leases.remove(lease)
            resident.used = self._clock()
            if not resident.leases:
                self._hungry.discard(lease.key)
                self._await_expiry()
            if self._line:
                self._advance()

    # -- for the engine thread

    def make_way(self, key: Hashable, rows: int, others: int, *, stuck: bool) -> Leaving[T]:
        """Idle models whose room lets rows of `key` have `rows` bytes and all others `others`.

        The caller unloads them and tells by `left`. While rows that run will make room by their
        end, only models leave that rest for some time. `stuck`: no row of `key` runs; where nothing
        idle will do, newcomers then keep away from the others.
        """
        with self._changed:
            need = rows + others - self._account.free
            never = stuck and rows > self._account.free  # unless a model leaves
            rested = inf if never else self._clock() - REST
            idle = self._idle(need, key, rested)
            leaving = self._let_go(idle or ())
            if idle is None and stuck:
                self._hungry.add(key)
            elif key in self._hungry:
                self._hungry.remove(key)
                self._advance()
            return leaving

    def left(self, resident: Resident[T]) -> None:
        """An unloaded model's bytes are free."""
        with self._changed:
            if self._residents.get(resident.key) is resident:
                del self._residents[resident.key]
                self._account.release(resident.key)
            self._advance()

    def grown(self, key: Hashable) -> None:
        """A model that is here takes other bytes than before."""
        with self._changed:
            resident = self._residents.get(key)
            if resident is not None and resident.model is not None:
                self._account.correct(key, resident.model.nbytes)

    def others_go_on(self, key: Hashable) -> bool:
        """Whether other models are in use whose requests will end without a byte of `key`'s."""
        with self._changed:
            return any(
                each.leases
                for each in self._residents.values()
                if each.key != key and each.key not in self._hungry
            )

    # -- state

    @property
    def free(self) -> int:
        """Bytes that weights leave."""
        with self._changed:
            return self._account.free

    def alone(self, key: Hashable) -> int:
        """Bytes that would be free if a model were the only one."""
        with self._changed:
            return self._account.limit - self._account.of(key)

    def models(self) -> list[T]:
        """Those that can be used now."""
        with self._changed:
            return [each.model for each in self._residents.values() if each.model is not None]

    def forget(self) -> list[T]:
        """The engine thread is gone, and every model with it: those that could be used."""
        with self._changed:
            self._generation += 1
            gone = self._let_go(self._residents.values())
            for resident, _ in gone:
                del self._residents[resident.key]
                self._account.release(resident.key)
            self._hungry.clear()
            self._advance()
        return [model for _, model in gone]

    def close(self, error: MLXProviderError) -> None:
        """Refuse who waits and who comes."""
        with self._changed:
            self._closed = error
            self._refuse(tuple(self._line), error)
            if self._expiry is not None:
                self._expiry.cancel()

    # -- the line (under the lock)

    def _at_once(self, key: Hashable, rows: int, keep_alive: float | None) -> Lease[T] | None:
        if self._closed is not None:
            raise for_another(self._closed)
        resident = self._residents.get(key)
        if resident is None or resident.model is None or not self._open(key, rows):
            return None
        resident.stay.ask(keep_alive)
        return self._lease(resident, resident.model, rows)

    def _open(self, key: Hashable, rows: int) -> bool:
        """Whether a newcomer may use a model that is here."""
        closed = key in self._claimed or self._others_hunger(key)
        return not closed and rows <= self._account.free

    def _others_hunger(self, key: Hashable) -> bool:
        return bool(self._hungry) and key not in self._hungry

    def _lease(self, resident: Resident[T], model: T, rows: int) -> Lease[T]:
        lease = Lease(model, resident.key, rows, self._released)
        resident.leases.add(lease)
        resident.used = self._clock()
        return lease

    def _served(self, ticket: _Ticket[T]) -> Lease[T]:
        """Wait until the ticket has its lease or is refused."""
        while ticket.lease is None:
            if ticket.error is not None:
                raise for_another(ticket.error)
            now = self._clock()
            if now >= ticket.deadline:
                raise RequestTimedOut("the request's time limit has passed")
            if now >= ticket.until and self._working_for != ticket.key:
                raise self._in_use(ticket)
            self._changed.wait(self._pause(ticket, now))
            if self._line and self._line[0] is ticket:
                self._advance()
        return ticket.lease

    def _pause(self, ticket: _Ticket[T], now: float) -> float | None:
        """Seconds after which to look again without being told."""
        times = (ticket.deadline, ticket.until, ticket.since + self._turn)
        soonest = min((at for at in times if at > now), default=inf)
        return None if soonest == inf else soonest - now

    def _advance(self) -> None:
        """Serve who can be served, and make room for the first who cannot."""
        first: _Ticket[T] | None = None
        self._claimed = frozenset()
        for ticket in tuple(self._line):
            lease = (
                None if self._closed else self._at_once(ticket.key, ticket.rows, ticket.keep_alive)
            )
            if lease is not None:
                ticket.lease = lease
                self._line.remove(ticket)
                self._changed.notify_all()
            elif first is None:
                first = ticket
                self._claimed = ticket.claims = self._claims(ticket)
        if first is not None and self._working_for is None:
            self._make_room(first)

    def _claims(self, ticket: _Ticket[T]) -> frozenset[Hashable]:
        """Models to close for a ticket whose turn it is; as far as possible the same as before."""
        if self._clock() < ticket.since + self._turn:
            return frozenset()
        others = [
            r
            for r in self._residents.values()
            if r.model is not None and r.key != ticket.key and not r.stay.pinned
        ]
        others.sort(key=lambda r: (r.key not in ticket.claims, r.used))
        lack, chosen = self._lack(ticket), []
        for resident in others:
            if lack <= 0:
                break
            chosen.append(resident.key)
            lack -= self._account.of(resident.key)
        return frozenset(chosen)

    def _lack(self, ticket: _Ticket[T]) -> int:
        """Bytes that are to get free for a ticket."""
        if ticket.key in self._residents:
            return ticket.rows - self._account.free
        return ticket.plan.nbytes + max(ticket.rows, self._rows()) - self._account.free

    def _rows(self) -> int:
        """Bytes that weights must leave: rows that run go on, and each that is queued can."""
        residents = self._residents.values()
        live = sum(each.model.live_bytes for each in residents if each.model is not None)
        return max(live, *(lease.rows for each in residents for lease in each.leases), 0)

    def _make_room(self, ticket: _Ticket[T]) -> None:
        if self._others_hunger(ticket.key):
            return
        absent = ticket.key not in self._residents
        if not absent and self._residents[ticket.key].model is None:
            return  # it is just leaving
        leaving = self._idle(self._lack(ticket), ticket.key)
        if leaving is None or not (absent or leaving):
            return
        if absent:
            self._account.reserve(ticket.key, ticket.plan.nbytes)
            self._residents[ticket.key] = Resident(ticket.key, self._clock())
        self._working_for = ticket.key
        arguments = (self._let_go(leaving), ticket.key, ticket.plan if absent else None)
        threading.Thread(target=self._work, args=arguments, name="mlx-load", daemon=True).start()

    def _idle(self, need: int, key: Hashable, before: float = inf) -> list[Resident[T]] | None:
        """Idle models other than `key` that hold so many bytes; `None`: there are too few.

        `before`: only those that nobody has used since.
        """
        idle = [
            each
            for each in self._residents.values()
            if each.model is not None
            and not each.leases
            and not each.stay.pinned
            and each.key != key
            and each.used <= before
        ]
        chosen = []
        for resident in sorted(idle, key=lambda each: each.used):
            if need <= 0:
                break
            chosen.append(resident)
            need -= self._account.of(resident.key)
        return chosen if need <= 0 else None

    def _let_go(self, residents: Iterable[Resident[T]]) -> Leaving[T]:
        """Nobody can have them any more; their bytes count until they are gone."""
        leaving: Leaving[T] = []
        for resident in residents:
            if resident.model is not None:
                leaving.append((resident, resident.model))
                resident.model = None
        return leaving

    def _refuse(self, tickets: Iterable[_Ticket[T]], error: MLXProviderError) -> None:
        for ticket in tickets:
            ticket.error = error
            self._line.remove(ticket)
        self._changed.notify_all()

    def _in_use(self, ticket: _Ticket[T]) -> MemoryInUse:
        account, used = self._account, sum(bool(r.leases) for r in self._residents.values())
        takes = account.of(ticket.key) or ticket.plan.nbytes
        pinned = sum(account.of(r.key) for r in self._residents.values() if r.stay.pinned)
        kept = f", {pinned} are pinned (keep_alive: -1)" if pinned else ""
        return MemoryInUse(
            f"{ticket.plan.name} has to wait for memory: it takes {takes} of the limit's "
            f"{account.limit} bytes, {max(0, account.free)} are free{kept}, and {used} other "
            f"models are in use; try again in {RETRY_AFTER:g} s, or raise "
            "MLX_PROVIDER_MEMORY_LIMIT",
            retry_after=RETRY_AFTER,
        )

    def _await_expiry(self) -> None:
        """See that idle models leave when they have stayed long enough."""
        ends = [
            each.stay.ends(each.used)
            for each in self._residents.values()
            if each.model is not None and not each.leases
        ]
        soonest = min(ends, default=inf)
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = None
        if soonest < inf and self._closed is None:
            self._expiry = threading.Timer(max(0.0, soonest - self._clock()), self._expire)
            self._expiry.daemon = True
            self._expiry.start()

    # -- coming and going (a thread of its own)

    def _expire(self) -> None:
        with self._changed:
            now = self._clock()
            leaving = self._let_go(
                each
                for each in self._residents.values()
                if not each.leases and each.stay.ends(each.used) <= now
            )
            self._await_expiry()
        self._leave(leaving)

    def _work(self, leaving: Leaving[T], key: Hashable, plan: Plan[T] | None) -> None:
        """Unload, then load: a client that leaves meanwhile takes nothing from the others."""
        generation = self._generation
        try:
            self._leave(leaving)
            if plan is not None:
                self._leave(self._bring(key, plan, generation))
        finally:
            with self._changed:
                self._working_for = None
                self._advance()
                self._changed.notify_all()

    def _leave(self, leaving: Leaving[T]) -> None:
        while leaving:
            resident, model = leaving.pop()
            try:
                self._unload(model)
            except EngineDied:
                log.warning("a model has gone with its engine thread")
            finally:
                self.left(resident)

    def _bring(self, key: Hashable, plan: Plan[T], generation: int) -> Leaving[T]:
        """Load a model; what has to leave because it took more than was expected."""
        model: T | None = None
        error: MLXProviderError = LoadFailed(f"{plan.name} could not be loaded")
        try:
            model = plan.load()
        except MLXProviderError as failure:
            error = for_another(failure)
        finally:
            with self._changed:
                leaving = self._settle(key, plan, model, error, generation)
        return leaving

    def _settle(
        self,
        key: Hashable,
        plan: Plan[T],
        model: T | None,
        error: MLXProviderError,
        generation: int,
    ) -> Leaving[T]:
        resident = self._residents[key]
        waiting = [ticket for ticket in self._line if ticket.key == key]
        if model is None:
            del self._residents[key]
            self._account.release(key)
            self._refuse(waiting, error)
            return []
        self._account.correct(key, model.nbytes)
        if generation != self._generation:
            self._refuse(waiting, EngineDied("the engine thread died while the model loaded"))
            return [(resident, model)]
        if model.nbytes > self._account.limit:
            self._refuse(waiting, _too_large(plan.name, model.nbytes, self._account.limit))
            return [(resident, model)]
        for ticket in waiting:
            ticket.plan = replace(ticket.plan, nbytes=model.nbytes)
        others = self._idle(self._rows() - self._account.free, key)
        if others is None:  # it comes back when there is room for what it takes
            return [(resident, model)]
        leaving = self._let_go(others)
        resident.model, resident.used = model, self._clock()
        self._advance()  # before anybody takes it for idle
        return leaving


def _too_large(name: str, nbytes: int, limit: int) -> LoadFailed:
    return LoadFailed(
        f"{name} has {nbytes} bytes of weights; the memory limit leaves {limit} for them: raise "
        "MLX_PROVIDER_MEMORY_LIMIT, or serve a smaller model"
    )
