"""The models that are loaded, each with its engine; loaded on demand, unloaded for room."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..config import EngineSettings
from ..engine.account import Recorder
from ..engine.engine import Engine
from ..engine.feature_cache import FeatureCache
from ..engine.memory import MemoryProfile, memory_limit
from ..engine.prefix_disk import DiskTier
from ..engine.prefix_store import PrefixStore
from ..engine.probe import Probe, probe
from ..engine.reuse import Reuse
from ..engine.scheduler import Budget, Limits, Scheduler
from ..engine.worker import EngineWorker
from ..errors import BadRequest, EngineUnavailable, MLXProviderError
from ..hub import folder_of
from ..isolation import Isolation, told
from ..protocol import ModelOptions, ModelStatus
from ..records import LoadedModel, LoadOptions, ReasoningParser, ToolParser
from ..registry import PluginRegistry
from ..upstream import mlx_lm
from ..upstream.checkpoint import read_json
from .grammar import GrammarCompiler

log = logging.getLogger(__name__)

Key = tuple[str, str]
ANY_FORMAT = "auto"
FORCED_FORMAT = "hermes"
MASK_THREADS = 2
"""Threads that compute grammar masks beside the device's step."""


@dataclass(eq=False)
class Served:
    """One loaded model."""

    name: str
    model: LoadedModel
    engine: Engine
    probe: Probe
    family: str
    plugin: str
    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    any_parser: ToolParser | None
    """Reads calls of a model whose template shows no known format."""
    forced_parser: ToolParser | None
    """Format of calls that such a model is made to write."""
    grammar: GrammarCompiler
    used: float = field(default_factory=time.monotonic)
    warmed: bool = False
    """The operator's warm prompts were sent."""
    arriving: int = 0
    """Requests that were let in but have not reached the engine thread."""

    @property
    def status(self) -> ModelStatus:
        info = self.model.info
        return ModelStatus(
            model=self.name,
            family=self.family,
            plugin=self.plugin,
            model_type=info.model_type,
            context_length=info.context_length,
            kv_layout=self.engine.batch.layout.name,
            vision="image" in info.media,
            weights_bytes=info.weights_bytes,
            tool_parser=self.tool_parser.name if self.tool_parser else None,
            reasoning_parser=self.reasoning_parser.name if self.reasoning_parser else None,
            notes=[*info.notes, *self.probe.notes],
        )


class Models:
    """Finds, loads and unloads. `get` is safe from any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        registry: PluginRegistry,
        worker: EngineWorker,
        recorder: Recorder,
        beside: Callable[[], int] = lambda: 0,
    ) -> None:
        """`beside`: bytes that requests hold for a while beside their rows (images)."""
        self._settings = settings
        self._registry = registry
        self._worker = worker
        self._recorder = recorder
        self._beside = beside
        self._served: dict[Key, Served] = {}
        self._loading: dict[Key, threading.Lock] = {}
        self._lock = threading.Lock()
        self._store: PrefixStore | None = None
        self._mask_pool = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="mlx-masks")

    def get(self, name: str, options: ModelOptions) -> Served:
        """The model, loaded if need be (blocks). Raises what finding or loading raises."""
        key = (name, options.model_dump_json(include=_LOAD_OPTIONS))
        with self._lock:
            if key in self._served:
                return self._touched(self._served[key])
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            with self._lock:
                if key in self._served:
                    return self._touched(self._served[key])
            served = self._load(name, options)
            with self._lock:
                self._served[key] = served
            return served

    def all(self) -> list[Served]:
        with self._lock:
            return list(self._served.values())

    def store_bytes(self) -> int:
        """Bytes that the prefix store holds."""
        return self._store.nbytes if self._store is not None else 0

    def store_report(self) -> dict[str, Any]:
        """What the prefix store holds and how often it was of use."""
        store = self._store
        return {} if store is None else self._worker.call(store.report).result()

    def store_clear(self) -> None:
        """Empty the prefix store."""
        store = self._store
        if store is not None:
            self._worker.call(store.clear).result()

    def close(self) -> None:
        """Write what is queued for the disk, end the threads."""
        store = self._store
        if store is not None and self._worker.alive:
            self._worker.call(store.close).result()
        self._mask_pool.shutdown(wait=False)

    def forget(self) -> None:
        """Drop every model (their engine thread is gone)."""
        with self._lock:
            self._served.clear()
        self._store = None

    def _touched(self, served: Served) -> Served:
        served.used = time.monotonic()
        return served

    # -- loading

    def _load(self, name: str, options: ModelOptions) -> Served:
        folder = folder_of(name)
        config = read_json(folder / "config.json")
        family, plugin = self._registry.family_for(config)
        self._make_room(folder)
        began = time.monotonic()
        load = partial(family.load, folder, load_options(options))
        with Isolation() as tried:
            served = self._worker.call(
                lambda: self._start(name, load(), options, family.name, plugin.name)
            ).result()
        if isinstance(tried.error, MLXProviderError):
            raise tried.error
        if tried.error is not None:
            log.error("loading %s", name, exc_info=tried.error)
            raise EngineUnavailable(
                f"{name} could not be loaded by family {family.name!r} of plugin {plugin.name}: "
                f"{told(tried.error)}"
            )
        log.info(
            "loaded %s in %.1f s: family %s, layout %s, %d bytes",
            name, time.monotonic() - began, family.name, served.probe.layout,
            served.model.info.weights_bytes,
        )  # fmt: skip
        return served

    def _start(
        self, name: str, model: LoadedModel, options: ModelOptions, family: str, plugin: str
    ) -> Served:
        """Probe the model and start its engine (engine thread)."""
        make_cache: Any = model.make_cache
        if options.kv_bits is not None:
            bits, group = options.kv_bits, options.kv_group_size
            make_cache = partial(_quantised_cache, model, bits, group)
        chosen = self._settings.kv_layout
        layouts = model.kv_layouts if chosen == "auto" else (chosen,)
        found = _probed(model, make_cache, layouts, options)
        for note in (*model.info.notes, *found.notes):
            log.warning("%s: %s", name, note)
        engine = Engine(
            model,
            Scheduler(self._limits(), self._budget(found.memory)),
            layout=found.layout,
            rides=found.rides,
            make_cache=make_cache,
            recorder=self._recorder,
            reuse=Reuse(self._prefix_store(), model, kv_kind(options), make_cache),
            features=FeatureCache(self._settings.feature_bytes),
        )
        self._worker.add(engine)
        template = model.info.chat_template or ""
        return Served(
            name=name,
            model=model,
            engine=engine,
            probe=found,
            family=family,
            plugin=plugin,
            tool_parser=self._tool_parser(options.tool_parser or model.info.tool_parser, template),
            reasoning_parser=self._reasoning_parser(
                options.reasoning_parser or model.info.reasoning_parser, template
            ),
            any_parser=self._registry.tool_parsers.get(ANY_FORMAT),
            forced_parser=self._registry.tool_parsers.get(FORCED_FORMAT),
            grammar=GrammarCompiler(
                model.tokenizer.fast,
                model.info.stop_tokens,
                model.info.vocab_size,
                pool=self._mask_pool,
            ),
        )

    def _tool_parser(self, name: str | None, template: str) -> ToolParser | None:
        if name is None:
            return self._registry.detect_tool_parser(template)
        return self._registry.tool_parser(name)

    def _reasoning_parser(self, name: str | None, template: str) -> ReasoningParser | None:
        if name is None:
            return self._registry.detect_reasoning_parser(template)
        return self._registry.reasoning_parser(name)

    # -- memory

    def _limits(self) -> Limits:
        s = self._settings
        return Limits(s.max_rows, s.max_queue, s.stall_target, s.max_chunk, s.output_reserve)

    def _budget(self, memory: MemoryProfile) -> Budget:
        return Budget(memory.row_bytes, self._available, self._reclaim, self._beside)

    def _prefix_store(self) -> PrefixStore:
        """The one store of this process, made on the engine thread that will own it."""
        if self._store is None:
            s = self._settings
            disk = DiskTier(s.disk_cache, s.disk_cache_bytes) if s.disk_cache else None
            self._store = PrefixStore(budget=self._store_budget, disk=disk)
        return self._store

    def _store_budget(self) -> int:
        """Bytes that live rows leave to the prefix store."""
        live = sum(s.engine.scheduler.live_bytes for s in self.all())
        left = max(0, self._available() - live - self._beside())
        chosen = self._settings.prefix_bytes
        return left if chosen is None else min(left, chosen)

    def _reclaim(self, need: int) -> None:
        """Shrink the store so that live rows may hold `need` bytes."""
        if self._store is not None:
            freed = self._store.evict_to(max(0, self._available() - need))
            if freed:
                self._recorder.evicted(1)

    def _available(self) -> int:
        """Bytes for live rows: the limit less the weights of every model."""
        weights = sum(s.model.info.weights_bytes for s in self.all())
        return memory_limit(self._settings.memory_limit) - weights

    def _make_room(self, folder: Path) -> None:
        """Unload the longest unused idle models until the new weights fit.

        Raises `EngineUnavailable` with the numbers when they cannot.
        """
        need = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        limit = memory_limit(self._settings.memory_limit)
        if need > limit:
            raise EngineUnavailable(
                f"{folder.name} has {need} bytes of weights; the memory limit is {limit}"
            )
        while need > self._available():
            idle = [s for s in self.all() if s.engine.idle and not s.arriving]
            if not idle:
                raise EngineUnavailable(
                    f"{folder.name} needs {need} bytes, {max(0, self._available())} are free, "
                    "and every loaded model is in use"
                )
            self._unload(min(idle, key=lambda s: s.used))

    def _unload(self, served: Served) -> None:
        log.info("unloading %s to make room", served.name)
        with self._lock:
            self._served = {k: s for k, s in self._served.items() if s is not served}
        self._worker.call(lambda: self._worker.remove(served.engine)).result()


_LOAD_OPTIONS = {
    "adapter", "trust_remote_code", "context_length", "kv_bits", "kv_group_size", "modality",
    "tool_parser", "reasoning_parser", "extra",
}  # fmt: skip
"""Options that make a model another one; the others belong to the request."""


def load_options(options: ModelOptions) -> LoadOptions:
    """The operator's options as a family takes them."""
    return LoadOptions(
        adapter=Path(options.adapter).expanduser() if options.adapter else None,
        trust_remote_code=options.trust_remote_code,
        context_length=options.context_length,
        modality=options.modality,
        extra=options.extra,
    )


def kv_kind(options: ModelOptions) -> str:
    """How the KV cache is kept, for the prefix store's key."""
    return f"{options.kv_bits} bits of {options.kv_group_size}" if options.kv_bits else ""


def _probed(
    model: LoadedModel, make_cache: Callable[[], list[Any]], layouts: Sequence[str], o: ModelOptions
) -> Probe:
    """Raises `BadRequest` where the model's attention cannot read a quantised cache.

    Sinks and latent attention cannot; others want heads that a group divides.
    """
    with Isolation() as tried:
        return probe(model, make_cache, layouts)
    if tried.error is None or o.kv_bits is None:
        raise tried.error or EngineUnavailable("the probe has no result")
    raise BadRequest(
        f"this model does not run with kv_bits={o.kv_bits} and kv_group_size="
        f"{o.kv_group_size} ({tried.error}); take kv_bits out of its model_info, or choose a "
        "kv_group_size that divides the size of its heads",
        param="kv_bits",
    )


def _quantised_cache(model: LoadedModel, bits: int, group_size: int) -> list[Any]:
    return mlx_lm.quantised(model.make_cache(), bits, group_size)
