"""Memory for the rows of one engine, and the holders that free some of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ..engine.execution.deep_cache import Reserve
from ..engine.memory import MemoryProfile
from ..engine.scheduling.scheduler import Budget
from .load_queue import LoadQueue
from .memory_ledger import MemoryLedger
from .prefixes import Prefixes
from .weights import Weights


@dataclass(frozen=True)
class RowBudgets:
    ledger: MemoryLedger
    queue: LoadQueue[Weights]
    prefixes: Prefixes
    unload: Callable[[Weights], None]
    """Called on the engine thread."""

    def budget(
        self,
        weights: Weights,
        kind: str,
        memory: MemoryProfile,
        passing: Callable[[int, int], int],
    ) -> Budget:
        """`passing`: see `Budget`."""
        return Budget(
            row_bytes=memory.row_bytes,
            passing=passing,
            available=partial(self._available, weights, kind),
            reclaim=partial(self._reclaim, weights, kind),
            alone=lambda: self.ledger.limit - self.ledger.of(weights.key),
            others_go_on=partial(self.queue.others_go_on, weights.key),
            image_bytes=self.ledger.media,
        )

    @contextmanager
    def measuring(self, weights: Weights) -> Iterator[Reserve]:
        """Reserves bytes for measurements until the end of the block."""

        def reserve(nbytes: int) -> bool:
            free = self.ledger.measure(weights.key, nbytes)
            if free:
                self.prefixes.shrink()
            return free

        try:
            yield reserve
        finally:
            self.ledger.measure(weights.key, 0)

    def _others(self, weights: Weights, kind: str) -> int:
        same = (each for name, each in list(weights.engines.items()) if name != kind)
        own = sum(each.engine.scheduler.live_bytes for each in same)
        return own + self.ledger.live(apart=weights.key)

    def _available(self, weights: Weights, kind: str) -> int:
        return self.ledger.free - self._others(weights, kind)

    def _reclaim(self, weights: Weights, kind: str, need: int) -> None:
        """Unload idle models, then shrink the prefix cache, so that rows may use `need` bytes."""
        live = weights.engines[kind].engine.scheduler.live_bytes
        stuck = need <= live or not live  # running rows need no more than they have, or no row runs
        others = self._others(weights, kind)
        for resident, model in self.queue.make_way(weights.key, need, others, stuck=stuck):
            self.unload(model)
            self.queue.left(resident)
        left = self._available(weights, kind) - need
        if left >= 0:
            self.prefixes.evict_to(left + self.ledger.in_use())
