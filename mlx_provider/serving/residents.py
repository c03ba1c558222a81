"""The models in memory: their holds, which are idle, and which may leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from .keep_alive import KeepAlive
from .memory_ledger import HoldsMemory, MemoryLedger

T = TypeVar("T", bound=HoldsMemory)


@dataclass(eq=False)
class Hold(Generic[T]):
    model: T
    key: Hashable
    rows: int
    """Bytes that weights must leave for its rows."""
    _released: Callable[[Hold[T]], None] = field(repr=False)

    def release(self) -> None:
        """Idempotent. Safe from any thread."""
        self._released(self)


@dataclass(eq=False)
class Resident(Generic[T]):
    key: Hashable
    used: float
    model: T | None = None
    """`None` while it loads or leaves."""
    holds: set[Hold[T]] = field(default_factory=set)
    keep_alive: KeepAlive = field(default_factory=KeepAlive)


Leaving = list[tuple[Resident[T], T]]


class Residents(Generic[T]):
    """No lock: calls are made under the owner's lock."""

    def __init__(self, ledger: MemoryLedger, clock: Callable[[], float] = time.monotonic) -> None:
        self.ledger = ledger
        self._clock = clock
        self._by_key: dict[Hashable, Resident[T]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[Resident[T]]:
        return iter(self._by_key.values())

    def get(self, key: Hashable) -> Resident[T] | None:
        return self._by_key.get(key)

    def of(self, key: Hashable) -> Resident[T]:
        """Raises `KeyError`."""
        return self._by_key[key]

    def usable(self) -> list[tuple[Resident[T], T]]:
        return [(each, each.model) for each in self if each.model is not None]

    def expect(self, key: Hashable, nbytes: int) -> None:
        self.ledger.reserve(key, nbytes)
        self._by_key[key] = Resident(key, self._clock())

    def arrived(self, resident: Resident[T], model: T) -> None:
        resident.model, resident.used = model, self._clock()

    def remove(self, resident: Resident[T]) -> None:
        """Free its bytes. Idempotent, also if another resident of its key exists."""
        if self._by_key.get(resident.key) is resident:
            del self._by_key[resident.key]
            self.ledger.release(resident.key)

    def hold(
        self, resident: Resident[T], model: T, rows: int, ended: Callable[[Hold[T]], None]
    ) -> Hold[T]:
        """`ended` is called at its end."""
        hold = Hold(model, resident.key, rows, ended)
        resident.holds.add(hold)
        resident.used = self._clock()
        return hold

    def release(self, hold: Hold[T]) -> Resident[T] | None:
        """`None`: it was already released."""
        resident = self._by_key.get(hold.key)
        if resident is None or hold not in resident.holds:
            return None
        resident.holds.remove(hold)
        resident.used = self._clock()
        return resident

    def idle(self, need: int, key: Hashable, before: float = inf) -> list[Resident[T]] | None:
        """Idle models other than `key` with `need` bytes in total, least recently used first.
        `None`: they hold too little. `before`: only those not used since."""
        idle = (
            each
            for each, _ in self.usable()
            if not (each.holds or each.keep_alive.pinned)
            and each.key != key
            and each.used <= before
        )
        return self._enough(sorted(idle, key=lambda each: each.used), need)

    def to_reserve(
        self, need: int, key: Hashable, before: frozenset[Hashable]
    ) -> frozenset[Hashable]:
        """Models that must accept no new requests until `need` bytes of them are idle. Prefers
        those of `before`."""
        others = [
            each for each, _ in self.usable() if each.key != key and not each.keep_alive.pinned
        ]
        others.sort(key=lambda each: (each.key not in before, each.used))
        chosen = self._enough(others, need)
        return frozenset(each.key for each in (others if chosen is None else chosen))

    def _enough(self, candidates: Iterable[Resident[T]], need: int) -> list[Resident[T]] | None:
        chosen: list[Resident[T]] = []
        for resident in candidates:
            if need <= 0:
                break
            chosen.append(resident)
            need -= self.ledger.of(resident.key)
        return chosen if need <= 0 else None

    def detach(self, residents: Iterable[Resident[T]]) -> Leaving[T]:
        """Their bytes count until they are freed."""
        leaving: Leaving[T] = []
        for resident in residents:
            if resident.model is not None:
                leaving.append((resident, resident.model))
                resident.model = None
        return leaving

    def rows(self) -> int:
        return max(self.ledger.live(), *(hold.rows for each in self for hold in each.holds), 0)

    def next_expiry(self) -> float:
        """`inf`: never."""
        idle = (each for each, _ in self.usable() if not each.holds)
        return min((each.keep_alive.ends(each.used) for each in idle), default=inf)

    def expired(self) -> list[Resident[T]]:
        now = self._clock()
        return [each for each in self if not each.holds and each.keep_alive.ends(each.used) <= now]
