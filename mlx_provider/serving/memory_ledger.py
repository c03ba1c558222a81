"""Accounts of the memory limit: weights, live rows, images, the prefix cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

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
