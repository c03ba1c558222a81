"""The prefix cache that all models of the process share."""

import logging
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
from ..engine.step_output import Recorder
from ..engine.worker import EngineWorker
from ..errors import BadRequest, EngineDied
from ..protocol.health import PrefixCacheStats
from .residents import MemoryLedger

log = logging.getLogger(__name__)

STATS_WAIT = 0.3
"""Seconds."""
NO_STATS = PrefixCacheStats()


@dataclass(eq=False)
class Prefixes:
    """Safe from any thread, except for the methods of the engine thread."""

    _ledger: MemoryLedger
    _worker: EngineWorker
    _recorder: Recorder
    _folder: Path | None  # of the disk tier, if any
    _disk_bytes: int | None  # 0: no disk tier; `None`: by the free space
    _newest: PrefixCacheStats = NO_STATS
    _pending: Future[PrefixCacheStats] | None = None

    @property
    def _cache(self) -> PrefixCache | None:
        return self._ledger.prefix_cache

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes if self._cache is not None else 0

    def stats(self) -> PrefixCacheStats:
        """Waits briefly for the engine thread (`STATS_WAIT`), else returns the previous ones."""
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
        """Counts of the cache's content, see `PrefixCache.report`. Empty: no cache. Blocks."""
        kept = self._cache
        return {} if kept is None else self._worker.call(kept.report).result()

    def clear(self) -> None:
        """Drop all stored prefixes, also those on disk (blocks)."""
        if (cache := self._cache) is not None:
            self._worker.call(cache.clear).result()

    def keep_share(self, share: float) -> None:
        """Evict all but this share of its bytes. Never blocks."""
        if self._cache is not None and self._worker.alive:
            self._worker.call(partial(self._keep_share_here, share))

    def close(self) -> None:
        """Write what is queued for the disk (blocks)."""
        if self._cache is not None and self._worker.alive:
            self._worker.call(self._cache.close).result()

    def cache(self) -> PrefixCache:
        """The cache, which the first call creates (engine thread)."""
        ledger = self._ledger
        if ledger.prefix_cache is None:
            ledger.prefix_cache = PrefixCache(budget=ledger.prefix_budget, disk=self._disk_tier())
        return ledger.prefix_cache

    def _disk_tier(self) -> DiskTier | None:
        folder, nbytes = self._folder, self._disk_bytes
        if folder is None or nbytes == 0:
            return None
        try:
            return DiskTier(folder, disk_limit(folder, nbytes), self._worker.call)
        except (BadRequest, OSError) as reason:
            log.warning("prefix cache: nothing is kept on disk: %s", reason)
            return None

    def shrink_to_budget(self) -> None:
        """Evict prefixes from memory that is reserved for weights (engine thread)."""
        self.evict_to(self._ledger.prefix_budget())

    def evict_to(self, nbytes: int) -> None:
        """Evict prefixes until at most `nbytes` are left, as far as possible (engine thread)."""
        if self._cache is not None and self._cache.evict(nbytes):
            self._recorder.count("prefix_cache_evictions")

    def _keep_share_here(self, share: float) -> None:
        self.evict_to(int(share * self.nbytes))
        mx.clear_cache()
