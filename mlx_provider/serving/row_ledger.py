"""The memory ledger of one engine's rows: the bytes that weights and rows of other models leave,
and those that can be freed for a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..engine.scheduling.ledger import Ledger, Limits, MemoryProfile

if TYPE_CHECKING:
    from .load_queue import LoadQueue
    from .prefixes import Prefixes
    from .residents import MemoryLedger
    from .weights import Weights


@dataclass(frozen=True)
class ProcessMemory:
    """What the rows of all engines of this process share."""

    ledger: MemoryLedger
    queue: LoadQueue
    prefixes: Prefixes
    unload: Callable[[Weights], None]  # called on the engine thread

    def reserve(self, nbytes: int) -> bool:
        """Evict prefixes, so that measurements find `nbytes` free. `False`: they do not fit."""
        left = self.ledger.unused_bytes - nbytes
        if left >= 0:
            self.prefixes.evict_to(left + self.ledger.prefixes_in_use)
        return left >= 0


@dataclass(eq=False)
class RowLedger(Ledger):
    limits: Limits
    _process: ProcessMemory
    _weights: Weights
    _memory: MemoryProfile
    _passing: Callable[[int, int], int]  # bytes of a pass of (prompt tokens, rows)

    def row_bytes(self, tokens: int) -> int:
        return self._memory.row_bytes(tokens)

    def pass_bytes(self, tokens: int, rows: int) -> int:
        return self._passing(tokens, rows)

    def available(self) -> int:  # bytes for all rows of this model
        return self._process.ledger.free - self._others()

    def available_alone(self) -> int:  # the same if no other model were loaded
        return self._process.ledger.limit - self._process.ledger.bytes_of(self._weights.key)

    def image_bytes(self) -> int:  # of images that requests hold until the model takes them
        return self._process.ledger.media_bytes()

    def others_go_on(self) -> bool:  # whether requests of other models will end without its memory
        return self._process.queue.others_go_on(self._weights.key)

    def unloadable(self, need: int, pinned: int) -> int:  # bytes; `pinned` ones of prefixes stay
        others, queue = self._others() + pinned, self._process.queue
        return queue.unloadable(self._weights.key, need, others, stuck=self._stuck(need))

    def reclaim(self, need: int) -> None:  # `need`: bytes for all rows of this model
        others, stuck, process = self._others(), self._stuck(need), self._process
        process.queue.make_way(self._weights.key, need, others, process.unload, stuck=stuck)
        left = self.available() - need
        if left >= 0:
            process.prefixes.evict_to(left + process.ledger.prefixes_in_use)

    def _others(self) -> int:
        """Bytes of rows of other models, and of the prefixes that any rows use."""
        return self._process.ledger.live_bytes(except_key=self._weights.key)

    def _stuck(self, need: int) -> bool:
        """Whether waiting does not help: no row runs, or running ones have at least `need`."""
        live = self._weights.live_bytes
        return need <= live or not live
