"""Maps names and options of a model to its weights, and to the view of a request.

Models of this process: found by name, loaded on demand, shared by their aliases.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..chat.output.turn_layout import layout_of
from ..config import EngineSettings
from ..engine.memory import memory_limit, pool_limit
from ..engine.step_output import Recorder
from ..engine.worker import EngineWorker
from ..errors import BadRequest, EngineDied, Forbidden, wrong_option
from ..families.checkpoint import named_context, read_json
from ..families.tokenizer.template_fit import fit_messages
from ..protocol.health import ModelStatus
from ..protocol.requests import ModelOptions
from ..records import LoadedModel
from ..registry import PluginRegistry
from .drafting import UNNAMED, check_drafts, check_sparse_prefill, draft_kind, sparse_kind
from .engine_builder import EngineBuilder
from .hub import folder_of
from .load_progress import LoadProgress
from .load_queue import LoadQueue
from .loader import Loader
from .prefixes import DiskSettings, Prefixes, RowBudgets
from .reproducible import engine_kind
from .residents import Hold, MemoryLedger
from .weight_files import WiredWeights
from .weights import EngineInstance, ModelView, Weights, WeightsKey

MAX_VIEWS = 64
"""Most views of one model."""


class Aliases:
    """Safe from any thread."""

    def __init__(self, registry: PluginRegistry) -> None:
        self._registry = registry
        self._own_context: dict[Path, int] = {}

    def check(self, options: ModelOptions) -> None:
        try:
            if options.tool_parser:
                self._registry.tool_parser(options.tool_parser)
            if options.reasoning_parser:
                self._registry.reasoning_parser(options.reasoning_parser)
            if options.drafter not in UNNAMED:
                self._registry.drafter(options.drafter)
        except BadRequest as error:
            raise wrong_option(error.param or "", error.message) from None
        check_drafts(options)
        check_sparse_prefill(options)

    def key(self, folder: Path, options: ModelOptions, *, may_lengthen: bool) -> WeightsKey:
        """`may_lengthen`: whether a context longer than the model's own is allowed, for which a
        family may need other weights. Raises `Forbidden`, `BadRequest`."""
        key = WeightsKey.of(folder, options)
        if options.context_length is None:
            return key
        config = read_json(key.folder / "config.json")
        own = self._own_context.get(key.folder) or named_context(
            config.get("text_config") or config
        )
        if own is None or options.context_length <= own:
            return key
        if not may_lengthen:
            raise _too_long(options)
        return replace(key, context_length=options.context_length)

    def misjudged(self, key: WeightsKey, weights: Weights, options: ModelOptions) -> bool:
        """Whether the load has shown that `key` names the wrong weights: only the loaded model has
        its exact context length."""
        if key.context_length is not None:
            return False
        own = self._own_context[key.folder] = weights.info.context_length
        return own < (options.context_length or 0)

    def kind(self, options: ModelOptions) -> str:
        kinds = [engine_kind(options), draft_kind(options), sparse_kind(options)]
        return " ".join(filter(None, kinds))

    def view(
        self, weights: Weights, name: str, options: ModelOptions, *, listed: bool = True
    ) -> ModelView:
        """The same view as long as the weights stay. `listed`: if false, its context length is that
        of one request, and appears nowhere."""
        if not listed:
            found = self.view(weights, name, options.model_copy(update={"context_length": None}))
            length = options.context_length or found.info.context_length
            return replace(found, info=replace(found.info, context_length=length))
        chosen = (
            name,
            self.kind(options),
            options.context_length,
            options.tool_parser,
            options.reasoning_parser,
            options.pooling,
        )
        views = weights.views
        view = views.get(chosen)
        if view is None:
            view = views.setdefault(chosen, self._view(weights, name, options))
            while len(views) > MAX_VIEWS:
                views.pop(next(iter(views)), None)
        return view

    def _view(self, weights: Weights, name: str, options: ModelOptions) -> ModelView:
        info, registry = weights.info, self._registry
        tool = options.tool_parser or info.tool_parser
        thought = options.reasoning_parser or info.reasoning_parser
        template = info.chat_template or ""
        calls = registry.tool_parser(tool) if tool else registry.detect_tool_parser(template)
        thoughts = (
            registry.reasoning_parser(thought)
            if thought
            else registry.detect_reasoning_parser(template)
        )
        return ModelView(
            name=name,
            weights=weights,
            kind=self.kind(options),
            info=replace(
                info,
                context_length=options.context_length or info.context_length,
                embedding=replace(
                    info.embedding, pooling=options.pooling or info.embedding.pooling
                ),
            ),
            tool_parser=calls,
            reasoning_parser=thoughts,
            layout=layout_of(partial(_rendered, weights.model), thoughts, calls),
            any_parser=registry.fallback_tool_parser("read"),
            forced_parser=registry.fallback_tool_parser("write"),
        )


def _too_long(options: ModelOptions) -> Forbidden:
    """Each longer context needs separate weights of a model."""
    return Forbidden(
        f"context_length {options.context_length} is beyond the model's own: grant it where the "
        "engine runs, in its owner's models file (MLX_PROVIDER_MODELS_FILE)",
        param="options.context_length",
    )


def _rendered(model: LoadedModel, messages: list[dict[str, Any]]) -> str:
    fitted = fit_messages(messages, model.info.template)
    return model.prepare(fitted, tools=[], media=[], variables={}).text


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
