"""The queue of requests that wait for a model, oldest first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from ..errors import LoadFailed, MemoryInUse, MLXProviderError
from .memory_ledger import HoldsMemory
from .residents import Hold, Residents

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
