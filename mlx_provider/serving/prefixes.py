"""The prefix cache that all models of the process share."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..config import EngineSettings
from ..engine.prefix_cache.cache import PrefixCache
from ..engine.prefix_cache.disk import DiskTier
from ..engine.prefix_cache.disk_limit import disk_limit
from ..engine.request_log import Recorder
from ..engine.worker import EngineWorker
from ..errors import BadRequest
from ..protocol.figures import PrefixCacheFigures
from .latest import Latest
from .memory_ledger import MemoryLedger

log = logging.getLogger(__name__)

FIGURES_WAIT = 0.3
NO_FIGURES = PrefixCacheFigures()


@dataclass(frozen=True)
class DiskSettings:
    folder: Path
    nbytes: int | None
    """0: no disk tier; `None`: by the free space."""

    @classmethod
    def of(cls, folder: Path, settings: EngineSettings) -> DiskSettings:
        return cls(folder, settings.disk_cache_bytes)


class Prefixes:
    """Safe from any thread, except for the methods of the engine thread."""

    def __init__(
        self,
        ledger: MemoryLedger,
        worker: EngineWorker,
        recorder: Recorder,
        disk: DiskSettings | None = None,
    ) -> None:
        self._ledger = ledger
        self._worker = worker
        self._recorder = recorder
        self._disk = disk
        self._cache: PrefixCache | None = None
        ledger.in_use = lambda: self.in_use
        self._latest = Latest(partial(worker.call, self._figures), NO_FIGURES)

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes if self._cache is not None else 0

    @property
    def in_use(self) -> int:
        """Bytes that rows use, so that they cannot be evicted."""
        return self._cache.in_use if self._cache is not None else 0

    def figures(self) -> PrefixCacheFigures:
        """Never waits long for the engine thread."""
        return NO_FIGURES if self._cache is None else self._latest.get(FIGURES_WAIT)

    def report(self) -> dict[str, Any]:
        """Blocks."""
        kept = self._cache
        return {} if kept is None else self._worker.call(kept.report).result()

    def clear(self) -> None:
        if self._cache is not None:
            self._worker.call(self.clear_here).result()

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
        chosen = self._disk
        if chosen is None or chosen.nbytes == 0:
            return None
        try:
            limit = disk_limit(chosen.folder, chosen.nbytes)
            return DiskTier(chosen.folder, limit, self._worker.call)
        except (BadRequest, OSError) as reason:
            log.warning("prefix cache: nothing is kept on disk: %s", reason)
            return None

    def clear_here(self) -> None:
        """Engine thread."""
        if self._cache is not None:
            self._cache.clear()

    def shrink(self) -> None:
        """Free the bytes reserved for weights (engine thread)."""
        self.evict_to(self._ledger.prefix_budget())

    def evict_to(self, nbytes: int) -> None:
        """Engine thread."""
        if self._cache is not None and self._cache.evict_to(nbytes):
            self._recorder.evicted(1)

    def _shrink_here(self, share: float) -> None:
        self.evict_to(int(share * self.nbytes))
        mx.clear_cache()

    def _figures(self) -> PrefixCacheFigures:
        return NO_FIGURES if self._cache is None else self._cache.figures()
