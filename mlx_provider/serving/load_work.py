"""The queue of requests that wait for a model, oldest first.

Unloads and loads in a separate thread, so that a cancelled request delays no other.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Generic, TypeVar

from ..errors import EngineDied, LoadFailed, MemoryInUse, MLXProviderError, for_another
from .residents import Hold, HoldsMemory, Leaving, Resident, Residents

RETRY_AFTER = 5.0
"""Seconds."""

T = TypeVar("T", bound=HoldsMemory)


@dataclass(frozen=True)
class LoadPlan(Generic[T]):
    name: str
    nbytes: int
    load: Callable[[], T]
    """Blocks; raises errors of `mlx_provider.errors`."""


@dataclass(eq=False)
class Ticket(Generic[T]):
    who: str
    key: Hashable
    plan: LoadPlan[T]
    rows: int
    keep_alive: float | None
    since: float
    until: float
    deadline: float
    hold: Hold[T] | None = None
    error: MLXProviderError | None = None
    reserved: frozenset[Hashable] = frozenset()
    """Models that accept no new requests until they become idle and leave."""

    def pause(self, now: float, turn: float) -> float | None:
        times = (self.deadline, self.until, self.since + turn)
        soonest = min((at for at in times if at > now), default=inf)
        return None if soonest == inf else soonest - now


class Line(Generic[T]):
    """No lock: calls are made under the owner's lock."""

    def __init__(self) -> None:
        self._tickets: list[Ticket[T]] = []

    def __iter__(self) -> Iterator[Ticket[T]]:
        return iter(tuple(self._tickets))

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def first(self) -> Ticket[T] | None:
        return self._tickets[0] if self._tickets else None

    def join(self, ticket: Ticket[T]) -> None:
        insort(self._tickets, ticket, key=lambda each: each.since)

    def leave(self, ticket: Ticket[T]) -> bool:
        """Remove a ticket. Returns whether it was in the queue."""
        if ticket not in self._tickets:
            return False
        self._tickets.remove(ticket)
        return True

    def refuse(self, tickets: Iterable[Ticket[T]], error: MLXProviderError) -> None:
        """The caller must notify their threads."""
        for ticket in tickets:
            ticket.error = error
            self._tickets.remove(ticket)


def too_large(name: str, nbytes: int, limit: int) -> LoadFailed:
    return LoadFailed(
        f"{name} has {nbytes} bytes of weights; the memory limit leaves {limit} for them: raise "
        "MLX_PROVIDER_MEMORY_LIMIT, or serve a smaller model"
    )


def in_use(ticket: Ticket[T], residents: Residents[T]) -> MemoryInUse:
    ledger, used = residents.ledger, sum(bool(each.holds) for each in residents)
    takes = ledger.of(ticket.key) or ticket.plan.nbytes
    pinned = sum(ledger.of(each.key) for each in residents if each.keep_alive.pinned)
    kept = f", {pinned} are pinned (keep_alive: -1)" if pinned else ""
    return MemoryInUse(
        f"{ticket.plan.name} has to wait for memory: it takes {takes} of the limit's "
        f"{ledger.limit} bytes, {max(0, ledger.free)} are free{kept}, and {used} other "
        f"models are in use; try again in {RETRY_AFTER:g} s, or raise "
        "MLX_PROVIDER_MEMORY_LIMIT",
        retry_after=RETRY_AFTER,
    )


log = logging.getLogger(__name__)


class LoadWork(Generic[T]):
    """One task at a time: models leave, then one loads."""

    def __init__(
        self,
        residents: Residents[T],
        line: Line[T],
        changed: threading.Condition,
        advance: Callable[[], None],
        unload: Callable[[T], None],
    ) -> None:
        """`changed` guards residents and queue. `advance` (under it) serves the queue again."""
        self._residents = residents
        self._line = line
        self._changed = changed
        self._advance = advance
        self._unload = unload
        self.key: Hashable | None = None
        self.generation = 0
        """Generation of the engine thread. A model that loaded on an earlier one is gone."""

    def start(self, leaving: Leaving[T], key: Hashable, plan: LoadPlan[T] | None) -> None:
        """`plan`: `None` if the model is in memory and its rows need more."""
        self.key = key
        arguments = (leaving, key, plan)
        threading.Thread(target=self._run, args=arguments, name="mlx-load", daemon=True).start()

    def leave(self, leaving: Leaving[T]) -> None:
        """Blocks; without the lock."""
        while leaving:
            resident, model = leaving.pop()
            try:
                self._unload(model)
            except EngineDied:
                log.warning("a model was lost with its engine thread")
            finally:
                self.left(resident)

    def left(self, resident: Resident[T]) -> None:
        with self._changed:
            self._residents.remove(resident)
            self._advance()

    def _run(self, leaving: Leaving[T], key: Hashable, plan: LoadPlan[T] | None) -> None:
        generation = self.generation
        try:
            self.leave(leaving)
            if plan is not None:
                self.leave(self._load(key, plan, generation))
        finally:
            with self._changed:
                self.key = None
                self._advance()
                self._changed.notify_all()

    def _load(self, key: Hashable, plan: LoadPlan[T], generation: int) -> Leaving[T]:
        """Returns models that must leave because this one took more than expected."""
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
        plan: LoadPlan[T],
        model: T | None,
        error: MLXProviderError,
        generation: int,
    ) -> Leaving[T]:
        ledger, resident = self._residents.ledger, self._residents.of(key)
        if model is None:
            self._residents.remove(resident)
            self._refuse(key, error)
            return []
        ledger.correct(key, model)
        if generation != self.generation:
            self._refuse(key, EngineDied("the engine thread died while the model loaded"))
            return [(resident, model)]
        if model.nbytes > ledger.limit:
            self._refuse(key, too_large(plan.name, model.nbytes, ledger.limit))
            return [(resident, model)]
        for ticket in self._line:
            if ticket.key == key:
                ticket.plan = replace(ticket.plan, nbytes=model.nbytes)
        others = self._residents.idle(self._residents.rows() - ledger.free, key)
        if others is None:  # it loads again when there is enough memory
            return [(resident, model)]
        leaving = self._residents.detach(others)
        self._residents.arrived(resident, model)
        self._advance()  # before it counts as idle
        return leaving

    def _refuse(self, key: Hashable, error: MLXProviderError) -> None:
        self._line.refuse((each for each in self._line if each.key == key), error)
        self._changed.notify_all()
