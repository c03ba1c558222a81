"""The models in memory, their leases, and the ledger of the memory limit, which divides it among
weights, live rows, images and the prefix cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from ..errors import LoadFailed, MemoryInUse

if TYPE_CHECKING:
    from ..engine.prefix_cache.cache import PrefixCache
    from .weights import Weights

OTHERS_SHARE = 1 / 3
"""Share of the memory beside weights that the prefix cache leaves to the next requests and to other
programs, unless the operator sets its size."""
RETRY_AFTER = 5.0
"""Seconds."""
PINNED = -1.0
"""`keep_alive` of a model that never leaves."""


@dataclass(eq=False)
class Resident:
    """A model from before its load until its weights are freed."""

    key: Hashable
    expected: int
    """Bytes until it is loaded."""
    model: Weights | None = None
    """`None` while it loads."""
    leaving: bool = False
    """Its bytes count until they are freed."""
    used: float = field(default_factory=time.monotonic)
    leases: set[Lease] = field(default_factory=set)
    keep_alive: float | None = None
    """The longest time of the config entries that have used it, in seconds after its last use.
    `None`: until another model needs its memory; `inf`: pinned."""

    @property
    def nbytes(self) -> int:
        return self.expected if self.model is None else self.model.nbytes

    @property
    def usable(self) -> Weights | None:
        return None if self.leaving else self.model

    @property
    def idle(self) -> bool:
        return self.usable is not None and not self.leases

    @property
    def pinned(self) -> bool:
        return self.keep_alive == inf

    @property
    def expires(self) -> float:
        """When it leaves although nothing needs its memory; `inf`: never."""
        return inf if self.keep_alive is None else self.used + self.keep_alive

    def extend(self, keep_alive: float | None) -> None:
        """`keep_alive` of an entry: seconds, `PINNED`, or `None`, which has no effect."""
        if keep_alive is not None:
            seconds = inf if keep_alive == PINNED else keep_alive
            self.keep_alive = max(self.keep_alive or 0.0, seconds)


@dataclass(eq=False)
class Lease(AbstractContextManager["Lease"]):
    """Keeps a model in memory until `release`. Safe from any thread."""

    model: Weights
    key: Hashable
    row_bytes: int
    """Bytes that weights must leave for its rows."""
    _ledger: MemoryLedger = field(repr=False)
    _ended: Callable[[Lease], None] = field(repr=False)

    def covers(self, row_bytes: int) -> bool:
        """Whether so many bytes for rows fit beside all weights. If so, no weights may take them;
        rows of other leases can."""
        with self._ledger.lock:
            if row_bytes > self._ledger.free:
                return False
            self.row_bytes = row_bytes
            return True

    def release(self) -> None:
        """Idempotent."""
        self._ended(self)

    def __exit__(self, *raised: object) -> None:
        self.release()


@dataclass(eq=False)
class MemoryLedger:
    """Weights come first, then live rows, then the prefix cache. Safe from any thread."""

    _limit: Callable[[], int]
    """Bytes for everything."""
    media: Callable[[], int] = lambda: 0
    """Bytes of images that requests hold."""
    prefix_bytes: int | None = None
    """The operator's size of the prefix cache."""
    prefix_cache: PrefixCache | None = None
    """That of all models, see `Prefixes`."""
    _residents: dict[Hashable, Resident] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __iter__(self) -> Iterator[Resident]:
        with self.lock:
            return iter(list(self._residents.values()))

    def get(self, key: Hashable) -> Resident | None:
        return self._residents.get(key)

    def reserve(self, key: Hashable, nbytes: int) -> Resident:
        """Raises `ValueError` for a second model of that key."""
        with self.lock:
            if key in self._residents:
                raise ValueError(f"{key} is in memory already")
            self._residents[key] = resident = Resident(key, nbytes)
            return resident

    def release(self, resident: Resident) -> None:
        """Idempotent, also if another resident of its key exists."""
        with self.lock:
            if self._residents.get(resident.key) is resident:
                del self._residents[resident.key]

    def of(self, key: Hashable) -> int:
        resident = self._residents.get(key)
        return 0 if resident is None else resident.nbytes

    @property
    def limit(self) -> int:
        return self._limit()

    @property
    def free(self) -> int:
        """Negative if a model took more than expected."""
        return self._limit() - sum(resident.nbytes for resident in self)

    @property
    def in_use(self) -> int:
        """Bytes of the prefix cache that rows use, so that they cannot be evicted."""
        return 0 if self.prefix_cache is None else self.prefix_cache.in_use

    def live(self, except_key: Hashable = None) -> int:
        """Reserved bytes of rows of all models except that one, and of the part of the prefix cache
        that rows use."""
        models = (resident.model for resident in self if resident.key != except_key)
        return self.in_use + sum(model.live_bytes for model in models if model is not None)

    @property
    def unused_bytes(self) -> int:
        """Bytes that weights, rows and images leave, the rest of the prefix cache included."""
        return self.free - self.live() - self.media()

    def prefix_budget(self) -> int:
        """Bytes for the prefix cache. Shrinks when a request is admitted or a model loads."""
        free, chosen = max(0, self.free), self.prefix_bytes
        if chosen is None:
            chosen = free - int(OTHERS_SHARE * free)
        return max(0, min(self.unused_bytes + self.in_use, chosen))

    def too_large(self, name: str, nbytes: int) -> LoadFailed:
        return LoadFailed(
            f"{name} has {nbytes} bytes of weights; the memory limit leaves {self.limit} for them: "
            "raise MLX_PROVIDER_MEMORY_LIMIT, or serve a smaller model"
        )

    def too_full(self, key: Hashable, name: str, nbytes: int) -> MemoryInUse:
        """`nbytes`: of the weights, unless the model is in memory."""
        used = sum(bool(resident.leases) for resident in self if resident.key != key)
        pinned = sum(resident.nbytes for resident in self if resident.pinned)
        kept = f", {pinned} are pinned (keep_alive: -1)" if pinned else ""
        return MemoryInUse(
            f"{name} has to wait for memory: it takes {self.of(key) or nbytes} of the limit's "
            f"{self.limit} bytes, {max(0, self.free)} are free{kept}, and {used} other models are "
            f"in use; try again in {RETRY_AFTER:g} s, or raise MLX_PROVIDER_MEMORY_LIMIT",
            retry_after=RETRY_AFTER,
        )
