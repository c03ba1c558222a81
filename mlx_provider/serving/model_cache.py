"""Models of this process: found by name, loaded on demand, shared by their aliases."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from math import inf

import mlx.core as mx

from ..config import EngineSettings
from ..engine.memory import memory_limit, pool_limit
from ..engine.request_log import Recorder
from ..engine.worker import EngineWorker
from ..errors import EngineDied
from ..protocol.health import ModelStatus
from ..protocol.options import ModelOptions
from ..registry import PluginRegistry
from .aliases import Aliases
from .engine_builder import EngineBuilder
from .hub import folder_of
from .load_progress import LoadProgress
from .load_queue import LoadQueue
from .loader import Loader
from .memory_ledger import MemoryLedger
from .model_view import ModelView
from .prefixes import DiskSettings, Prefixes
from .residents import Hold
from .row_budget import RowBudgets
from .weights import EngineInstance, Weights
from .wired_weights import WiredWeights

MASK_THREADS = 2
"""Threads that compute grammar masks in parallel with the device's step."""


@dataclass(frozen=True)
class Lease(AbstractContextManager["Lease"]):
    """Keeps a model in memory until `end`."""

    view: ModelView
    _hold: Hold[Weights]
    _queue: LoadQueue[Weights]

    def covers(self, rows: int) -> bool:
        """Whether weights leave so many bytes for rows. If so, they are reserved."""
        return self._queue.covers(self._hold, rows)

    def end(self) -> None:
        """Idempotent. Safe from any thread."""
        self._hold.release()

    def __exit__(self, *raised: object) -> None:
        self.end()


class ModelCache:
    """Safe from any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        registry: PluginRegistry,
        worker: EngineWorker,
        recorder: Recorder,
        media: Callable[[], int] = lambda: 0,
    ) -> None:
        limit = memory_limit(settings.memory_limit)
        pool = pool_limit(limit)
        self._worker = worker
        self._pool_before = mx.set_cache_limit(pool)
        self._mask_pool = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="mlx-masks")
        self._grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="mlx-grammars")
        self._aliases = Aliases(registry)
        self.ledger = MemoryLedger(
            lambda: limit - pool, media=media, prefix_bytes=settings.prefix_bytes
        )
        folder = settings.disk_cache
        self.prefixes = Prefixes(
            self.ledger,
            worker,
            recorder,
            disk=None if folder is None else DiskSettings.of(folder, settings),
        )
        self._wired = WiredWeights(on=settings.wire_weights)
        self.progress = LoadProgress()
        self.loader = Loader(
            registry,
            worker,
            feature_bytes=settings.feature_bytes,
            mask_pool=self._mask_pool,
            grammar_pool=self._grammar_pool,
            shrink_prefix_cache=self.prefixes.shrink,
            limit=lambda: self.ledger.limit,
            wired=self._wired,
            progress=self.progress,
        )
        self.queue: LoadQueue[Weights] = LoadQueue(
            self.ledger, self.loader.unload, patience=settings.model_wait
        )
        budgets = RowBudgets(self.ledger, self.queue, self.prefixes, self.loader.unload_here)
        self.builder = EngineBuilder(settings, registry, worker, recorder, budgets, self.progress)

    def use(
        self,
        name: str,
        options: ModelOptions,
        *,
        who: str = "",
        rows: int = 0,
        since: float | None = None,
        deadline: float = inf,
        repository: bool = False,
        may_lengthen: bool = True,
        listed: bool = True,
    ) -> Lease:
        """The model, loaded if necessary, with `rows` bytes beside all weights (blocks), see
        `LoadQueue.acquire`.

        `repository`: the name is not that of a folder. `may_lengthen`, `listed`: see `Aliases`.
        Raises the errors of finding and loading it, and `BadRequest` for options that the model
        does not support."""
        self._aliases.check(options)
        with self.progress.stage(name, "files of the Hub"):
            folder = folder_of(name, repository=repository)
        for _ in range(2):  # the first load may show that the context is longer than its own
            key = self._aliases.key(folder, options, may_lengthen=may_lengthen)
            hold = self.queue.acquire(
                key,
                partial(self.loader.plan, key, options, name),
                who=who,
                rows=rows,
                keep_alive=options.keep_alive,
                since=since,
                deadline=deadline,
            )
            if not self._aliases.misjudged(key, hold.model, options):
                break
            hold.release()
        with ExitStack() as undo:
            undo.callback(hold.release)
            lease = Lease(self._view(hold.model, name, options, listed=listed), hold, self.queue)
            undo.pop_all()
        return lease

    def _view(
        self, weights: Weights, name: str, options: ModelOptions, *, listed: bool
    ) -> ModelView:
        kind = self._aliases.kind(options)
        if kind not in weights.engines:
            self._worker.call(partial(self.builder.start, weights, kind, options)).result()
        return self._aliases.view(weights, name, options, listed=listed)

    def withdraw(self, who: str) -> None:
        self.queue.withdraw(who)

    def views(self) -> list[ModelView]:
        return [view for weights in self.queue.models() for view in list(weights.views.values())]

    def statuses(self) -> list[ModelStatus]:
        found = (view.status for view in self.views())
        return [status for status in found if status is not None]

    def engines(self) -> list[EngineInstance]:
        return [each for weights in self.queue.models() for each in list(weights.engines.values())]

    def close(self) -> None:
        """Writes the queue to disk and ends the threads."""
        self.queue.close(EngineDied("the engine is shutting down"))
        for instance in self.engines():
            instance.learned()
        self.prefixes.close()
        self._mask_pool.shutdown(wait=False)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)
        mx.set_cache_limit(self._pool_before)

    def forget(self) -> None:
        """Remove all models after the death of the engine thread."""
        self.prefixes.forget()
        self._wired.forget()
        for weights in self.queue.forget():
            weights.drop()
