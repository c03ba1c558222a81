"""The prefix cache that all models of the process share, and the memory for rows of an engine."""

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..engine.prefix_cache.cache import PrefixCache
from ..engine.prefix_cache.disk import DiskTier
from ..engine.prefix_cache.files import disk_limit
from ..engine.scheduling.ledger import Ledger, Limits, MemoryProfile
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
        self._newest = NO_STATS
        self._pending: Future[PrefixCacheStats] | None = None

    @property
    def _cache(self) -> PrefixCache | None:
        return self._ledger.prefix_cache

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes if self._cache is not None else 0

    def stats(self) -> PrefixCacheStats:
        """Never waits long for the engine thread: it then gives the previous ones."""
        if self._cache is None:
            return NO_STATS
        try:
            pending = self._pending = self._pending or self._worker.call(self._cache.stats)
            self._newest = pending.result(STATS_WAIT)
        except NotYet:
            return self._newest
        except (EngineDied, CancelledError):
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

    def cache(self) -> PrefixCache:
        """Created on the engine thread."""
        ledger = self._ledger
        if ledger.prefix_cache is None:
            ledger.prefix_cache = PrefixCache(budget=ledger.prefix_budget, disk=self._disk_tier())
        return ledger.prefix_cache

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


@dataclass(frozen=True)
class RowBudgets:
    ledger: MemoryLedger
    queue: LoadQueue
    prefixes: Prefixes
    unload: Callable[[Weights], None]
    """Called on the engine thread."""

    def reserve(self, nbytes: int) -> bool:
        """See `probe.Reserve` (engine thread, on which no row runs during measurements)."""
        left = self.ledger.unused - nbytes
        if left >= 0:
            self.prefixes.evict_to(left + self.ledger.in_use)
        return left >= 0


@dataclass(eq=False)
class RowLedger(Ledger):
    """For the rows of one engine."""

    limits: Limits
    _process: RowBudgets
    _weights: Weights
    _memory: MemoryProfile
    _passing: Callable[[int, int], int]
    """Bytes of a pass, see `pass_bytes`."""

    def row_bytes(self, tokens: int) -> int:
        return self._memory.row_bytes(tokens)

    def pass_bytes(self, tokens: int, rows: int) -> int:
        return self._passing(tokens, rows)

    def available(self) -> int:
        return self._process.ledger.free - self._others()

    def alone(self) -> int:
        return self._process.ledger.limit - self._process.ledger.of(self._weights.key)

    def image_bytes(self) -> int:
        return self._process.ledger.media()

    def others_go_on(self) -> bool:
        return self._process.queue.others_go_on(self._weights.key)

    def unloadable(self, need: int, pinned: int) -> int:
        others, queue = self._others() + pinned, self._process.queue
        return queue.unloadable(self._weights.key, need, others, stuck=self._stuck(need))

    def reclaim(self, need: int) -> None:
        others, stuck, process = self._others(), self._stuck(need), self._process
        process.queue.make_way(self._weights.key, need, others, process.unload, stuck=stuck)
        left = self.available() - need
        if left >= 0:
            process.prefixes.evict_to(left + process.ledger.in_use)

    def _others(self) -> int:
        """Bytes that rows of other models, and the part of the prefix cache in use, have."""
        return self._process.ledger.live(apart=self._weights.key)

    def _stuck(self, need: int) -> bool:
        """Running rows need no more than they have, or no row runs."""
        live = self._weights.live_bytes
        return need <= live or not live
