"""Accounts of the memory limit: weights, live rows, images, the prefix cache.

The time that an unused model stays in memory.

The models in memory: their holds, which are idle, and which may leave.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Protocol, TypeVar

OTHERS_SHARE = 1 / 3
"""Share of the memory beside weights that the prefix cache leaves to the next requests and to other
programs, unless the operator sets its size."""


class HoldsMemory(Protocol):
    @property
    def nbytes(self) -> int:
        """Measured bytes of the weights."""

    @property
    def live_bytes(self) -> int:
        """Reserved bytes of its rows."""


@dataclass
class _Account:
    nbytes: int
    model: HoldsMemory | None = None
    """`None` while it loads."""
    measuring: int = 0


class MemoryLedger:
    """One account per model, from before its load until its weights are freed. Safe from any
    thread. Weights come first, then live rows, then the prefix cache."""

    def __init__(
        self,
        limit: Callable[[], int],
        *,
        media: Callable[[], int] = lambda: 0,
        prefix_bytes: int | None = None,
    ) -> None:
        """`limit`: bytes for all accounts. `media`: bytes of images that requests hold.
        `prefix_bytes`: the operator's size of the prefix cache."""
        self._limit = limit
        self.media = media
        self._prefix_bytes = prefix_bytes
        self.in_use: Callable[[], int] = lambda: 0
        """Bytes of the prefix cache that rows use. Set by the prefix cache."""
        self._accounts: dict[Hashable, _Account] = {}
        self._lock = threading.Lock()

    def reserve(self, key: Hashable, nbytes: int) -> None:
        """Raises `ValueError` for a second account."""
        with self._lock:
            if key in self._accounts:
                raise ValueError(f"{key} has an account already")
            self._accounts[key] = _Account(nbytes)

    def correct(self, key: Hashable, model: HoldsMemory) -> None:
        """Use measured bytes. Raises `ValueError` without an account."""
        with self._lock:
            if key not in self._accounts:
                raise ValueError(f"{key} has no account")
            self._accounts[key] = _Account(model.nbytes, model)

    def release(self, key: Hashable) -> None:
        """Idempotent."""
        with self._lock:
            self._accounts.pop(key, None)

    def of(self, key: Hashable) -> int:
        with self._lock:
            return self._accounts[key].nbytes if key in self._accounts else 0

    def measure(self, key: Hashable, nbytes: int) -> bool:
        """Reserve bytes for measurements in place of earlier ones. Returns whether they are free;
        if not, the earlier reservation stays."""
        others = self.live() + self.media()
        with self._lock:
            account = self._accounts[key]
            more = nbytes - account.measuring
            if more > 0 and more > self._free() - others:
                return False
            account.measuring = nbytes
            return True

    @property
    def limit(self) -> int:
        return self._limit()

    @property
    def free(self) -> int:
        """Negative if a model took more than expected."""
        with self._lock:
            return self._free()

    def _free(self) -> int:
        return self._limit() - sum(each.nbytes for each in self._accounts.values())

    def live(self, apart: Hashable = None) -> int:
        """Reserved bytes of rows and measurements of all models except `apart`, and of the part of
        the prefix cache that rows use."""
        with self._lock:
            accounts = [a for key, a in self._accounts.items() if key != apart]
        return self.in_use() + sum(
            a.measuring + (a.model.live_bytes if a.model else 0) for a in accounts
        )

    def prefix_budget(self) -> int:
        """Bytes for the prefix cache. Shrinks when a request is admitted or a model loads."""
        free, chosen = max(0, self.free), self._prefix_bytes
        if chosen is None:
            chosen = free - int(OTHERS_SHARE * free)
        own = self.live() - self.in_use()
        return max(0, min(free - own - self.media(), chosen))


PINNED = -1.0
"""The model never leaves."""


@dataclass
class KeepAlive:
    """The longest `keep_alive` of the config entries that have used a model."""

    seconds: float | None = None
    """Seconds after its last use. `None`: until another model needs its memory."""
    pinned: bool = False

    def ask(self, keep_alive: float | None) -> None:
        """`keep_alive` of an entry: seconds, `PINNED`, or `None`, which has no effect."""
        if keep_alive == PINNED:
            self.pinned = True
        elif keep_alive is not None:
            self.seconds = max(self.seconds or 0.0, keep_alive)

    def ends(self, used: float) -> float:
        """When a model last used at `used` leaves although nothing needs its memory; `inf`:
        never."""
        return inf if self.pinned or self.seconds is None else used + self.seconds


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
