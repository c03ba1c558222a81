"""Who holds how many bytes of the memory limit: weights, live rows, images, the prefix cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

OTHERS_SHARE = 1 / 3
"""Share of what weights leave that the prefix cache never takes, unless the operator sets its size:
for the next requests, and so that other programs stay in memory."""


class HoldsMemory(Protocol):
    """What the ledger asks of a model in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, as measured."""

    @property
    def live_bytes(self) -> int:
        """Bytes set aside for the rows that run on it."""


@dataclass
class _Account:
    nbytes: int
    model: HoldsMemory | None = None
    """`None` while it loads."""


class MemoryLedger:
    """One account for each model, from before its load until its weights are gone. Any thread.

    Weights come first. Live rows get what weights leave, and the prefix cache what both leave.
    """

    def __init__(
        self,
        limit: Callable[[], int],
        *,
        media: Callable[[], int] = lambda: 0,
        prefix_bytes: int | None = None,
    ) -> None:
        """`limit`: bytes for all holders. `media`: bytes of images that requests hold now.
        `prefix_bytes`: size of the prefix cache that the operator set."""
        self._limit = limit
        self.media = media
        self._prefix_bytes = prefix_bytes
        self._accounts: dict[Hashable, _Account] = {}
        self._lock = threading.Lock()

    # -- weights

    def reserve(self, key: Hashable, nbytes: int) -> None:
        """Set aside what a model is expected to take. Raises `ValueError` for a second account."""
        with self._lock:
            if key in self._accounts:
                raise ValueError(f"{key} has an account already")
            self._accounts[key] = _Account(nbytes)

    def correct(self, key: Hashable, model: HoldsMemory) -> None:
        """Count what a model takes by measurement. Raises `ValueError` without an account."""
        with self._lock:
            if key not in self._accounts:
                raise ValueError(f"{key} has no account")
            self._accounts[key] = _Account(model.nbytes, model)

    def release(self, key: Hashable) -> None:
        """A model is gone, or was never loaded. Idempotent."""
        with self._lock:
            self._accounts.pop(key, None)

    def of(self, key: Hashable) -> int:
        """Bytes of one model's weights; 0 without an account."""
        with self._lock:
            return self._accounts[key].nbytes if key in self._accounts else 0

    # -- what is left

    @property
    def limit(self) -> int:
        """Bytes for all holders."""
        return self._limit()

    @property
    def free(self) -> int:
        """Bytes that weights leave; below zero where a model took more than was expected."""
        with self._lock:
            return self._limit() - sum(each.nbytes for each in self._accounts.values())

    def live(self, apart: Hashable = None) -> int:
        """Bytes set aside for the rows of all models, or of all but `apart`."""
        with self._lock:
            accounts = list(self._accounts.items())
        return sum(a.model.live_bytes for key, a in accounts if a.model and key != apart)

    def prefix_budget(self) -> int:
        """Bytes that weights, live rows and images leave to the prefix cache; it gives the others
        what they need when a request is admitted or a model loads."""
        free, chosen = max(0, self.free), self._prefix_bytes
        if chosen is None:
            chosen = free - int(OTHERS_SHARE * free)
        return max(0, min(free - self.live() - self.media(), chosen))
