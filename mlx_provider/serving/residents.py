"""The models in memory, their leases, and the ledger that divides the memory limit:

weights + live rows + images + prefixes that can be evicted <= limit
free = limit - weights
unused_bytes = free - live rows - images

Prefixes that rows use count as live rows. Prefixes that can be evicted count as unused."""

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

RESERVED_SHARE = 1 / 3
"""Share of `free` that the prefix cache leaves to the next requests and to other programs, unless
the operator sets its size."""
RETRY_SECONDS = 5.0
PINNED = -1.0
"""`keep_alive` of a model that never leaves."""


@dataclass(eq=False)
class Resident:
    """A model from before its load until its weights are freed."""

    key: Hashable
    expected_bytes: int  # `nbytes` while it loads
    model: Weights | None = None  # `None` while it loads
    unloading: bool = False  # its bytes still count
    last_used: float = field(default_factory=time.monotonic)
    leases: set[Lease] = field(default_factory=set)
    keep_alive: float | None = None
    """Seconds that it stays after its last use: the longest of the config entries that have used
    it. `None`: until another model needs its memory; `inf`: pinned."""

    @property
    def nbytes(self) -> int:
        return self.expected_bytes if self.model is None else self.model.nbytes

    @property
    def usable(self) -> Weights | None:
        return None if self.unloading else self.model

    @property
    def idle(self) -> bool:
        return self.usable is not None and not self.leases

    @property
    def pinned(self) -> bool:
        return self.keep_alive == inf

    @property
    def expires_at(self) -> float:
        """When it leaves although nothing needs its memory; `inf`: never."""
        return inf if self.keep_alive is None else self.last_used + self.keep_alive

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
    row_bytes: int  # bytes that weights which load later must leave for its rows
    _ledger: MemoryLedger = field(repr=False)
    _on_release: Callable[[Lease], None] = field(repr=False)

    def try_reserve(self, row_bytes: int) -> bool:
        """Set `row_bytes`, if so many fit beside the weights in memory (rows of other leases do not
        count). False: they do not fit."""
        with self._ledger.lock:
            if row_bytes > self._ledger.free:
                return False
            self.row_bytes = row_bytes
            return True

    def release(self) -> None:
        """Idempotent."""
        self._on_release(self)

    def __exit__(self, *raised: object) -> None:
        self.release()


@dataclass(eq=False)
class MemoryLedger:
    """Weights come first, then live rows, then the prefix cache. Safe from any thread."""

    _limit: Callable[[], int]
    media_bytes: Callable[[], int] = lambda: 0  # bytes of images that requests hold
    prefix_limit: int | None = None  # the operator's size of the prefix cache
    prefix_cache: PrefixCache | None = None  # shared by all models, see `Prefixes`
    _residents: dict[Hashable, Resident] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __iter__(self) -> Iterator[Resident]:
        with self.lock:
            return iter(list(self._residents.values()))

    def get(self, key: Hashable) -> Resident | None:
        return self._residents.get(key)

    def add(self, key: Hashable, nbytes: int) -> Resident:
        """Raises `ValueError` for a second model of that key."""
        with self.lock:
            if key in self._residents:
                raise ValueError(f"{key} is in memory already")
            self._residents[key] = resident = Resident(key, nbytes)
            return resident

    def remove(self, resident: Resident) -> None:
        """Idempotent, also if another resident of its key exists."""
        with self.lock:
            if self._residents.get(resident.key) is resident:
                del self._residents[resident.key]

    def bytes_of(self, key: Hashable) -> int:
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
    def prefixes_in_use(self) -> int:
        """Bytes of the prefix cache that rows use, so that they cannot be evicted."""
        return 0 if self.prefix_cache is None else self.prefix_cache.in_use

    def live_bytes(self, except_key: Hashable = None) -> int:
        """Bytes reserved for rows of all models except that one, and bytes of prefixes in use."""
        models = (resident.model for resident in self if resident.key != except_key)
        return self.prefixes_in_use + sum(model.live_bytes for model in models if model is not None)

    @property
    def unused_bytes(self) -> int:
        return self.free - self.live_bytes() - self.media_bytes()

    def prefix_budget(self) -> int:
        """Bytes for the prefix cache. Shrinks when a request is admitted or a model loads."""
        free, limit = max(0, self.free), self.prefix_limit
        if limit is None:
            limit = free - int(RESERVED_SHARE * free)
        # `unused_bytes` leaves out its part in use
        return max(0, min(self.unused_bytes + self.prefixes_in_use, limit))

    def too_large_error(self, name: str, nbytes: int) -> LoadFailed:
        return LoadFailed(
            f"{name} has {nbytes} bytes of weights; the memory limit leaves {self.limit} for them: "
            "raise MLX_PROVIDER_MEMORY_LIMIT, or serve a smaller model"
        )

    def in_use_error(self, key: Hashable, name: str, nbytes: int) -> MemoryInUse:
        """`nbytes`: of the weights, unless the model is in memory."""
        leased = sum(bool(resident.leases) for resident in self if resident.key != key)
        pinned = sum(resident.nbytes for resident in self if resident.pinned)
        free = f"{max(0, self.free)} are free"
        if pinned:
            free += f", {pinned} are pinned (keep_alive: -1)"
        return MemoryInUse(
            f"{name} has to wait for memory: it takes {self.bytes_of(key) or nbytes} of the "
            f"limit's {self.limit} bytes, {free}, and {leased} other models are in use; try again "
            f"in {RETRY_SECONDS:g} s, or raise MLX_PROVIDER_MEMORY_LIMIT",
            retry_after=RETRY_SECONDS,
        )
