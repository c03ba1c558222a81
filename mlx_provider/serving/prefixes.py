"""The prefix cache that all models of the process share, and the memory for rows of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..engine.execution.probe import Reserve
from ..engine.memory import MemoryProfile
from ..engine.prefix_cache.cache import PrefixCache
from ..engine.prefix_cache.disk import DiskTier, disk_limit
from ..engine.scheduling.scheduler import Budget
from ..engine.step_output import Recorder
from ..engine.worker import EngineWorker
from ..errors import BadRequest, EngineDied
from ..protocol.health import PrefixCacheStats
from .load_queue import LoadQueue
from .residents import MemoryLedger
from .weights import Weights

log = logging.getLogger(__name__)

STATS_WAIT = 0.3
NO_STATS = PrefixCacheStats()


class Prefixes:
    """Safe from any thread, except for the methods of the engine thread."""

    def __init__(
        self,
        ledger: MemoryLedger,
        worker: EngineWorker,
        recorder: Recorder,
        folder: Path | None,
        disk_bytes: int | None,
    ) -> None:
        """`folder`: of the disk tier, if any. `disk_bytes`: 0: no disk tier; `None`: by the free
        space."""
        self._ledger = ledger
        self._worker = worker
        self._recorder = recorder
        self._disk = folder, disk_bytes
        self._cache: PrefixCache | None = None
        ledger.in_use = lambda: self.in_use
        self._newest = NO_STATS
        self._pending: Future[PrefixCacheStats] | None = None

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes if self._cache is not None else 0

    @property
    def in_use(self) -> int:
        """Bytes that rows use, so that they cannot be evicted."""
        return self._cache.in_use if self._cache is not None else 0

    def stats(self) -> PrefixCacheStats:
        """Never waits long for the engine thread: it then gives the previous ones."""
        if self._cache is None:
            return NO_STATS
        try:
            pending = self._pending = self._pending or self._worker.call(self._stats)
            self._newest = pending.result(STATS_WAIT)
        except NotYet:
            return self._newest
        except (EngineDied, CancelledError):  # the next call asks a new engine thread
            pass
        self._pending = None
        return self._newest

    def report(self) -> dict[str, Any]:
        """Blocks."""
        kept = self._cache
        return {} if kept is None else self._worker.call(kept.report).result()

    def clear(self) -> None:
        if (cache := self._cache) is not None:
            self._worker.call(cache.clear).result()

    def shrink_to(self, share: float) -> None:
        """Evict to this share of its bytes. Never blocks."""
        if self._cache is not None and self._worker.alive:
            self._worker.call(partial(self._shrink_here, share))

    def close(self) -> None:
        """Writes the queue to disk (blocks)."""
        if self._cache is not None and self._worker.alive:
            self._worker.call(self._cache.close).result()

    def forget(self) -> None:
        """Called after the death of the engine thread."""
        self._cache = None

    def cache(self) -> PrefixCache:
        """Created on the engine thread."""
        if self._cache is None:
            budget = self._ledger.prefix_budget
            self._cache = PrefixCache(budget=budget, disk=self._disk_tier())
        return self._cache

    def _disk_tier(self) -> DiskTier | None:
        folder, nbytes = self._disk
        if folder is None or nbytes == 0:
            return None
        try:
            return DiskTier(folder, disk_limit(folder, nbytes), self._worker.call)
        except (BadRequest, OSError) as reason:
            log.warning("prefix cache: nothing is kept on disk: %s", reason)
            return None

    def shrink(self) -> None:
        """Free the bytes reserved for weights (engine thread)."""
        self.evict_to(self._ledger.prefix_budget())

    def evict_to(self, nbytes: int) -> None:
        """Engine thread."""
        if self._cache is not None and self._cache.evict(nbytes):
            self._recorder.count("prefix_cache_evictions")

    def _shrink_here(self, share: float) -> None:
        self.evict_to(int(share * self.nbytes))
        mx.clear_cache()

    def _stats(self) -> PrefixCacheStats:
        return NO_STATS if self._cache is None else self._cache.stats()


@dataclass(frozen=True)
class RowBudgets:
    ledger: MemoryLedger
    queue: LoadQueue
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
            unloadable=partial(self._unloadable, weights, kind),
            alone=lambda: self.ledger.limit - self.ledger.of(weights.key),
            others_go_on=partial(self.queue.others_go_on, weights.key),
            image_bytes=self.ledger.media,
        )

    @contextmanager
    def measuring(self, weights: Weights) -> Iterator[Reserve]:
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

    def _stuck(self, weights: Weights, kind: str, need: int) -> bool:
        """Running rows need no more than they have, or no row runs."""
        live = weights.engines[kind].engine.scheduler.live_bytes
        return need <= live or not live

    def _unloadable(self, weights: Weights, kind: str, need: int) -> int:
        others, stuck = self._others(weights, kind), self._stuck(weights, kind, need)
        return self.queue.unloadable(weights.key, need, others, stuck=stuck)

    def _reclaim(self, weights: Weights, kind: str, need: int) -> None:
        """Unload idle models, then shrink the prefix cache, so that rows may use `need` bytes."""
        others, stuck = self._others(weights, kind), self._stuck(weights, kind, need)
        self.queue.make_way(weights.key, need, others, self.unload, stuck=stuck)
        left = self._available(weights, kind) - need
        if left >= 0:
            self.prefixes.evict_to(left + self.ledger.in_use())
