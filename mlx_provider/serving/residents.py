"""The models in memory: who holds them, which are idle, and which may leave."""

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
    """A request's hold on a model, which stays in memory until `release`."""

    model: T
    key: Hashable
    rows: int
    """Bytes for its rows that weights must leave."""
    _released: Callable[[Hold[T]], None] = field(repr=False)

    def release(self) -> None:
        """Idempotent; any thread."""
        self._released(self)


@dataclass(eq=False)
class Resident(Generic[T]):
    """A model in memory, or one that loads or leaves."""

    key: Hashable
    used: float
    model: T | None = None
    """`None` while it loads, and while it leaves."""
    holds: set[Hold[T]] = field(default_factory=set)
    keep_alive: KeepAlive = field(default_factory=KeepAlive)


Leaving = list[tuple[Resident[T], T]]


class Residents(Generic[T]):
    """Has no lock: its owner makes every call under its own."""

    def __init__(self, ledger: MemoryLedger, clock: Callable[[], float] = time.monotonic) -> None:
        self.ledger = ledger
        self._clock = clock
        self._by_key: dict[Hashable, Resident[T]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[Resident[T]]:
        return iter(self._by_key.values())

    def get(self, key: Hashable) -> Resident[T] | None:
        """The one of this key, whatever its state."""
        return self._by_key.get(key)

    def of(self, key: Hashable) -> Resident[T]:
        """Raises `KeyError`."""
        return self._by_key[key]

    def usable(self) -> list[tuple[Resident[T], T]]:
        """Those that a request can use now."""
        return [(each, each.model) for each in self if each.model is not None]

    def expect(self, key: Hashable, nbytes: int) -> None:
        """A model begins to load."""
        self.ledger.reserve(key, nbytes)
        self._by_key[key] = Resident(key, self._clock())

    def arrived(self, resident: Resident[T], model: T) -> None:
        """It has loaded, and can be used."""
        resident.model, resident.used = model, self._clock()

    def remove(self, resident: Resident[T]) -> None:
        """Its bytes are free. Idempotent, also where another one of its key has come."""
        if self._by_key.get(resident.key) is resident:
            del self._by_key[resident.key]
            self.ledger.release(resident.key)

    def hold(
        self, resident: Resident[T], model: T, rows: int, ended: Callable[[Hold[T]], None]
    ) -> Hold[T]:
        """One more request uses a model; `ended` is called at its end."""
        hold = Hold(model, resident.key, rows, ended)
        resident.holds.add(hold)
        resident.used = self._clock()
        return hold

    def release(self, hold: Hold[T]) -> Resident[T] | None:
        """The model that has lost this hold; `None`: it was released before."""
        resident = self._by_key.get(hold.key)
        if resident is None or hold not in resident.holds:
            return None
        resident.holds.remove(hold)
        resident.used = self._clock()
        return resident

    def idle(self, need: int, key: Hashable, before: float = inf) -> list[Resident[T]] | None:
        """Idle models other than `key` that hold `need` bytes together; `None`: too few do.

        The longest unused comes first. `before`: only those that nobody has used since.
        """
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
        """Models to close to newcomers until `need` bytes of them are idle.

        As far as possible those of `before`.
        """
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
        """Nobody can use them any more; their bytes count until they are gone."""
        leaving: Leaving[T] = []
        for resident in residents:
            if resident.model is not None:
                leaving.append((resident, resident.model))
                resident.model = None
        return leaving

    def rows(self) -> int:
        """Bytes that weights must leave: rows that run go on, and each that is queued can begin."""
        return max(self.ledger.live(), *(hold.rows for each in self for hold in each.holds), 0)

    def next_expiry(self) -> float:
        """When the first idle model has stayed long enough; `inf`: never."""
        idle = (each for each, _ in self.usable() if not each.holds)
        return min((each.keep_alive.ends(each.used) for each in idle), default=inf)

    def expired(self) -> list[Resident[T]]:
        """Idle models that have stayed long enough."""
        now = self._clock()
        return [each for each in self if not each.holds and each.keep_alive.ends(each.used) <= now]
