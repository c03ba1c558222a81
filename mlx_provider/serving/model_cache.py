"""Models of this process: found by name, loaded on demand, one for all that need its weights."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..chat.output.turn_layout import layout_of
from ..engine.step_output import Recorder
from ..engine.worker import EngineWorker
from ..errors import BadRequest, EngineDied, Forbidden, wrong_option
from ..families.checkpoint import DEFAULT_CONTEXT, named_context, read_json, text_fields
from ..families.tokenizer.template import fit_messages
from ..protocol.requests import ModelOptions
from ..records import LoadedModel
from ..registry import PluginRegistry
from ..settings import EngineSettings
from .drafting import OFF, SPARSE, UNNAMED
from .engine_builder import EngineBuilder
from .hub import folder_of, no_folder
from .load_queue import LoadQueue
from .loader import Loader
from .memory_limit import memory_limit, pool_limit
from .prefixes import Prefixes
from .residents import Lease, MemoryLedger
from .row_ledger import ProcessMemory
from .stats import LoadProgress
from .weights import EngineInstance, ModelView, Weights, WeightsKey

VIEWS_PER_MODEL = 64


class ModelCache:
    """Keeps the parts that find, load and unload models. Safe from any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        registry: PluginRegistry,
        worker: EngineWorker,
        recorder: Recorder,
        media: Callable[[], int] = lambda: 0,
    ) -> None:
        self.limit = memory_limit(settings.memory_limit)
        pool = pool_limit(self.limit)
        self._registry = registry
        self._worker = worker
        self._own_context: dict[Path, int] = {}
        """The context length of each folder's model, as its family gave it."""
        self._pool_before = mx.set_cache_limit(pool)
        self.ledger: MemoryLedger = MemoryLedger(
            lambda: self.limit - pool, media_bytes=media, prefix_limit=settings.prefix_bytes
        )
        disk = settings.disk_cache, settings.disk_cache_bytes
        self.prefixes = Prefixes(self.ledger, worker, recorder, *disk)
        self.progress = LoadProgress()
        parts = registry, worker, self.ledger, self.prefixes.shrink_to_budget, self.progress
        self.loader = Loader(*parts, settings.feature_bytes)
        self.queue = LoadQueue(self.ledger, self.loader.unload, patience=settings.model_wait)
        memory = ProcessMemory(self.ledger, self.queue, self.prefixes, self.loader.unload_here)
        self.builder = EngineBuilder(settings, registry, worker, recorder, memory, self.progress)

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
    ) -> tuple[ModelView, Lease]:
        """The model, loaded if necessary, and a lease on it. Blocks. `who`, `rows`, `since` and
        `deadline`: see `LoadQueue.acquire`.
        `repository`: the name is not that of a folder. `may_lengthen`: whether a context longer
        than the model's own is allowed, for which a family may need other weights. `listed`: if
        false, the context length is that of one request, and no status shows it. Raises the errors
        of finding and loading the model, and `BadRequest` for options that it does not support."""
        _check_options(self._registry, options)
        with self.progress.stage(name, "files of the Hub"):
            folder = folder_of(name, repository=repository)
        acquire = partial(self.queue.acquire, who=who, rows=rows, since=since, deadline=deadline)
        for _ in range(2):  # the first load may show that the context is longer than its own
            key = self._key(folder, options, may_lengthen=may_lengthen)
            plan = partial(self.loader.plan, key, options, name)
            lease = acquire(key, plan, keep_alive=options.keep_alive)
            if key.context_length is not None:
                break
            own = self._own_context[key.folder] = lease.model.info.context_length
            if own >= (options.context_length or 0):
                break
            lease.release()
        with ExitStack() as undo:
            undo.callback(lease.release)
            if lease.model.started is None:
                self._worker.call(partial(self.builder.start, lease.model, options)).result()
            view = self._view(lease.model, name, options, listed=listed)
            undo.pop_all()
        return view, lease

    def _key(self, folder: Path, options: ModelOptions, *, may_lengthen: bool) -> WeightsKey:
        key, length = WeightsKey.of(folder, options), options.context_length
        if length is None:
            return key
        config = read_json(key.folder / "config.json")
        named = named_context(text_fields(config)) or DEFAULT_CONTEXT
        if length <= self._own_context.get(key.folder, named):
            return key
        if not may_lengthen:  # each longer context needs separate weights
            raise Forbidden(
                f"context_length {length} is beyond the model's own: grant it where the engine "
                "runs, in its owner's models file (MLX_PROVIDER_MODELS_FILE)",
                param="options.context_length",
            )
        return replace(key, context_length=length)

    def _view(
        self, weights: Weights, name: str, options: ModelOptions, *, listed: bool
    ) -> ModelView:
        """The view of this name and these options: the same one as long as the weights stay."""
        if not listed:
            common = options.model_copy(update={"context_length": None})
            view = self._view(weights, name, common, listed=True)
            length = options.context_length or view.info.context_length
            return replace(view, info=replace(view.info, context_length=length))
        parsers = options.tool_parser, options.reasoning_parser
        chosen = (name, options.context_length, *parsers, options.pooling)
        views = weights.views
        if chosen not in views:
            views.setdefault(chosen, _view_of(weights, name, options, self._registry))
            while len(views) > VIEWS_PER_MODEL:
                views.pop(next(iter(views)), None)
        return views[chosen]

    def views(self) -> list[ModelView]:
        return [view for weights in self.queue.models() for view in list(weights.views.values())]

    def engines(self) -> list[EngineInstance]:
        return [each for weights in self.queue.models() if (each := weights.started) is not None]

    def close(self) -> None:
        """End all waiting and the threads, and write what is queued for the disk (blocks)."""
        self.queue.close(EngineDied("the engine is shutting down"))
        for instance in self.engines():
            instance.keep_curve()
        self.prefixes.close()
        self.loader.close()
        mx.set_cache_limit(self._pool_before)

    def drop(self) -> None:
        """Free all weights, after the end of the engine thread."""
        for weights in self.queue.models():
            weights.drop()


def _check_options(registry: PluginRegistry, options: ModelOptions) -> None:
    """Raise `BadRequest` for unknown names, and for options that exclude each other."""
    try:
        if options.tool_parser:
            registry.tool_parser(options.tool_parser)
        if options.reasoning_parser:
            registry.reasoning_parser(options.reasoning_parser)
        if options.drafter not in UNNAMED:
            registry.drafter(options.drafter)
    except BadRequest as error:
        raise wrong_option(error.param or "", error.message) from None
    if options.reproducible and (options.drafter not in UNNAMED or options.draft_model):
        raise wrong_option("drafter", "passes of a reproducible model have no room for drafts")
    draft_model = options.draft_model
    if draft_model is not None and not Path(draft_model).expanduser().is_dir():
        raise wrong_option("draft_model", no_folder(draft_model))
    if options.sparse_prefill is None:
        return
    if options.reproducible:
        raise wrong_option(SPARSE, "a reproducible model computes every token of a prompt")
    if options.kv_bits is not None:
        raise wrong_option(SPARSE, "no tokens can be left out of a quantised KV cache (kv_bits)")
    if options.drafter == OFF:
        raise wrong_option(SPARSE, "a draft model finds out which tokens matter; drafter is off")


def _view_of(
    weights: Weights, name: str, options: ModelOptions, registry: PluginRegistry
) -> ModelView:
    info = weights.info
    tool_name = options.tool_parser or info.tool_parser
    reasoning_name = options.reasoning_parser or info.reasoning_parser
    template = info.chat_template or ""
    tools = registry.tool_parser(tool_name) if tool_name else registry.detect_tool_parser(template)
    detect = registry.detect_reasoning_parser
    reasoning = registry.reasoning_parser(reasoning_name) if reasoning_name else detect(template)
    pooling = options.pooling or info.embedding.pooling
    return ModelView(
        name=name,
        weights=weights,
        info=replace(
            info,
            context_length=options.context_length or info.context_length,
            embedding=replace(info.embedding, pooling=pooling),
        ),
        tool_parser=tools,
        reasoning_parser=reasoning,
        layout=layout_of(partial(_render, weights.model), reasoning, tools),
        any_parser=registry.fallback_tool_parser("read"),
        forced_parser=registry.fallback_tool_parser("write"),
    )


def _render(model: LoadedModel, messages: list[dict[str, Any]]) -> str:
    fitted = fit_messages(messages, model.info.template)
    return model.prepare(fitted, tools=[], media=[], variables={}).text
