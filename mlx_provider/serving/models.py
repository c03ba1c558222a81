"""The models of this process: found by name, loaded on demand, shared by all their aliases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx

from ..chat.output.turn_layout import layout_of
from ..config import EngineSettings
from ..engine.engine import Engine
from ..engine.execution.calibration import calibrate
from ..engine.execution.pass_memory import PassBytes, PassMemory, measure
from ..engine.memory import MemoryProfile, memory_limit, pool_limit
from ..engine.prefix_cache.cache import PrefixCache
from ..engine.prefix_cache.disk import DiskTier
from ..engine.prefix_cache.policy import PrefixCachePolicy
from ..engine.prefix_cache.whole_passes import WholePasses
from ..engine.request_log import Recorder
from ..engine.scheduling.chunking import IDLE_STALL_SECONDS
from ..engine.scheduling.costs import Costs
from ..engine.scheduling.plan import GRID
from ..engine.scheduling.scheduler import Budget, Limits, Scheduler
from ..engine.unlike import Unlike, unlike
from ..engine.worker import EngineWorker
from ..errors import BadRequest, EngineDied, Forbidden, MLXProviderError, wrong_option
from ..families.checkpoint import named_context, read_json
from ..families.tokenizer.template_fit import fit_messages
from ..isolation import Isolation
from ..protocol.figures import PrefixCacheFigures
from ..protocol.health import ModelStatus
from ..protocol.options import ModelOptions
from ..records import LoadedModel
from ..registry import PluginRegistry
from .decoding_text import batching, fixed_passes
from .drafting import UNNAMED, Drafts, check_drafts, draft_kind, drafts_of
from .hub import folder_of
from .kv_choice import MakeCache, cache_maker, check_kv, engine_kind, kv_kind, tried
from .latest import Latest
from .loading import Loading, WeightsKey, told
from .measurements import MEASURED, Measured, Measurements, circumstances, software
from .model_pool import Lease, ModelPool
from .reproducible import Reproducible
from .served import Loaded, Running, Served
from .sparse_prefill import check_sparse_prefill, sparse_kind, sparse_prefill_of
from .split import WHOLE, Ranks
from .weight_account import WeightAccount

log = logging.getLogger(__name__)

CHOSEN = ("bfloat16", "float16")
"""Dtypes of weights in which not every device runs every layer (experts on a CPU, mlx 0.32.4)."""
MASK_THREADS = 2
"""Threads that compute grammar masks beside the device's step."""
PREFIX_SHARE = 1 / 3
"""Of what weights leave, for the prefix cache unless its size is chosen: other programs stay in
memory as long as requests do not need the rest."""
PREFIX_LEAST = 2 * 2**30
"""Bytes that the prefix cache may have nevertheless, up to half of what weights leave: less holds
no agent's prompt."""
OUTLINE_PATIENCE = 0.3
"""Seconds for the engine thread to end its step, for the sake of who watches."""
NO_PREFIXES = PrefixCacheFigures()
ALIASES = 64
"""Names and choices of options that are remembered for one model."""


@dataclass(frozen=True)
class Use(AbstractContextManager["Use"]):
    """A request's hold on a model, which stays in memory until `end`."""

    served: Served
    _lease: Lease[Loaded]
    _models: Models

    def covers(self, rows: int) -> bool:
        """Whether weights leave so many bytes for the request's rows, and will."""
        return self._models.pool.covers(self._lease, rows)

    def end(self) -> None:
        """Idempotent; any thread."""
        self._lease.release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


class Models:
    """Safe from any thread, but for what is named otherwise."""

    def __init__(
        self,
        settings: EngineSettings,
        registry: PluginRegistry,
        worker: EngineWorker,
        recorder: Recorder,
        beside: Callable[[], int] = lambda: 0,
        ranks: Ranks = WHOLE,
    ) -> None:
        """`beside`: bytes that requests hold for a while beside their rows (images)."""
        self._beside = beside
        self.ranks = ranks
        self._settings = settings
        self._registry = registry
        self._worker = worker
        self._recorder = recorder
        self._measurements = Measurements.chosen(settings.measurements)
        self._prefix_cache: PrefixCache | None = None
        self._outline = Latest(lambda: worker.call(self._outlined), NO_PREFIXES)
        self._pool_before = mx.set_cache_limit(self._pool_limit)
        self._mask_pool = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="mlx-masks")
        self._own_context: dict[Path, int] = {}
        """Context lengths of folders that were loaded, by the model's own limit."""
        self.loading = Loading(
            registry,
            worker,
            feature_bytes=settings.feature_bytes,
            mask_pool=self._mask_pool,
            shrink_prefix_cache=self._shrink_prefix_cache,
            limit=self._limit,
            ranks=ranks,
        )
        self.pool = ModelPool(
            WeightAccount(self._limit),
            self.loading.unload,
            patience=settings.model_wait,
        )

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
    ) -> Use:
        """The model, loaded if need be, and `rows` bytes beside all weights (blocks).

        `repository`: its name is no folder's. `may_lengthen`: to a context beyond its own.
        See `ModelPool.acquire`. Raises what finding or loading raises, `BadRequest` for options
        that the model cannot have.
        """
        self._check_parsers(options)
        key = self._key(folder_of(name, repository=repository), options)
        if not may_lengthen and key.context_length is not None:
            raise _too_long(options)
        lease = self.pool.acquire(
            key,
            partial(self.loading.plan, key, options, name),
            who=who,
            rows=rows,
            keep_alive=options.keep_alive,
            since=since,
            deadline=deadline,
        )
        own = lease.model.info.context_length
        if key.context_length is None:
            self._own_context[key.folder] = own
            if own < (options.context_length or 0):
                lease.release()
                if not may_lengthen:
                    raise _too_long(options)
                return self.use(
                    name,
                    options,
                    who=who,
                    rows=rows,
                    since=since,
                    deadline=deadline,
                    repository=repository,
                )
        with ExitStack() as undo:
            undo.callback(lease.release)
            use = Use(self._served(lease.model, name, options), lease, self)
            undo.pop_all()
        return use

    def withdraw(self, who: str) -> None:
        """Whoever waits for a model by this name has left."""
        self.pool.withdraw(who)

    def all(self) -> list[Served]:
        """Every name and choice of options under which models in memory were asked for."""
        return [served for loaded in self.pool.models() for served in list(loaded.served.values())]

    def statuses(self) -> list[ModelStatus]:
        """Each of them, for people."""
        found = (served.status for served in self.all())
        return [status for status in found if status is not None]

    def engines(self) -> list[Running]:
        """Every engine."""
        return [each for loaded in self.pool.models() for each in list(loaded.running.values())]

    def prefix_cache_bytes(self) -> int:
        """Bytes that the prefix cache holds."""
        return self._prefix_cache.nbytes if self._prefix_cache is not None else 0

    def prefix_cache_figures(self) -> PrefixCacheFigures:
        """The same for who watches: never waits long for the engine thread."""
        if self._prefix_cache is None:
            return NO_PREFIXES
        return self._outline.get(OUTLINE_PATIENCE)

    def prefix_cache_report(self) -> dict[str, Any]:
        """What the prefix cache holds and how often it was of use."""
        kept = self._prefix_cache
        return {} if kept is None else self._worker.call(kept.report).result()

    def prefix_cache_clear(self) -> None:
        """Empty the prefix cache."""
        kept = self._prefix_cache
        if kept is not None:
            self._worker.call(kept.clear).result()

    def close(self) -> None:
        """Write what is queued for the disk, end the threads."""
        self.pool.close(EngineDied("the engine is shutting down"))
        kept = self._prefix_cache
        if kept is not None and self._worker.alive:
            self._worker.call(kept.close).result()
        if self.ranks.size > 1 and self._worker.alive:
            self._worker.call(partial(self.ranks.agreed.tell, "end", dict)).result()
        self._mask_pool.shutdown(wait=False)
        mx.set_cache_limit(self._pool_before)

    def forget(self) -> None:
        """Drop every model (their engine thread is gone)."""
        self._prefix_cache = None
        for loaded in self.pool.forget():
            loaded.drop()

    # -- names and options

    def _key(self, folder: Path, options: ModelOptions) -> WeightsKey:
        """Which weights; a context longer than the model's own may be a matter of its family."""
        key = WeightsKey.of(folder, options)
        if options.context_length is None:
            return key
        config = read_json(key.folder / "config.json")
        own = self._own_context.get(key.folder) or named_context(
            config.get("text_config") or config
        )
        longer = own is not None and options.context_length > own
        return replace(key, context_length=options.context_length) if longer else key

    def _served(self, loaded: Loaded, name: str, options: ModelOptions) -> Served:
        kinds = [engine_kind(options), draft_kind(options), sparse_kind(options)]
        kind = " ".join(filter(None, kinds))
        if kind not in loaded.running:
            self._worker.call(partial(self.start, loaded, kind, options)).result()
        wanted = (
            options.context_length,
            options.tool_parser,
            options.reasoning_parser,
            options.pooling,
        )
        known = loaded.served
        served = known.get((name, kind, *wanted))
        if served is None:
            served = self._view(loaded, name, kind, options)
            served = known.setdefault((name, kind, *wanted), served)
            while len(known) > ALIASES:
                known.pop(next(iter(known)), None)
        return served

    def _view(self, loaded: Loaded, name: str, kind: str, options: ModelOptions) -> Served:
        info = loaded.info
        tool = options.tool_parser or info.tool_parser
        thought = options.reasoning_parser or info.reasoning_parser
        template = info.chat_template or ""
        calls = (
            self._registry.tool_parser(tool)
            if tool
            else self._registry.detect_tool_parser(template)
        )
        thoughts = (
            self._registry.reasoning_parser(thought)
            if thought
            else self._registry.detect_reasoning_parser(template)
        )
        return Served(
            name=name,
            loaded=loaded,
            kind=kind,
            info=replace(
                info,
                context_length=options.context_length or info.context_length,
                embedding=replace(
                    info.embedding, pooling=options.pooling or info.embedding.pooling
                ),
            ),
            tool_parser=calls,
            reasoning_parser=thoughts,
            layout=layout_of(partial(_rendered, loaded.model), thoughts, calls),
            any_parser=self._registry.fallback_tool_parser("read"),
            forced_parser=self._registry.fallback_tool_parser("write"),
        )

    def _check_parsers(self, options: ModelOptions) -> None:
        """Before anything is loaded for the sake of a wrong name."""
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
        self.ranks.check(options)

    # -- engines (engine thread)

    def start(self, loaded: Loaded, kind: str, options: ModelOptions) -> None:
        """Probe the model and start its engine of one kind, unless it is there."""
        if kind in loaded.running:
            return
        self.ranks.agreed.tell("start", partial(_told, loaded, kind, options))
        problem = self._problem(loaded, kind, options)
        if problem is not None:
            raise problem

    def _problem(self, loaded: Loaded, kind: str, options: ModelOptions) -> MLXProviderError | None:
        with Isolation() as trying:
            loaded.running[kind] = self._running(loaded, kind, options)
            self.pool.grown(loaded.key)
        if trying.fault is None:
            return None
        if options.dtype in CHOSEN and not trying.fault.ours:
            remedy = f"{loaded.name} does not run in {options.dtype} here; leave it at auto"
            return wrong_option("dtype", f"{remedy} ({trying.fault.told})")
        return told(
            trying.fault,
            loaded.name,
            loaded.family,
            trusted=options.trust_remote_code,
            stranger=loaded.stranger,
        )

    def _running(self, loaded: Loaded, kind: str, options: ModelOptions) -> Running:
        model = loaded.model
        chosen = self._settings.kv_layout
        own = list(model.kv_layouts) if chosen == "auto" else [chosen]
        layouts = self.ranks.agreed.on("layouts", lambda: own, list[str], list[str])
        make_cache = cache_maker(model, options)
        plugins = [f"{each} {self._registry.sources(each)}" for each in self._registry.plugins]
        kv = " ".join(filter(None, (kv_kind(options), loaded.code)))
        key = circumstances(loaded, kv, layouts, [*plugins, f"{self.ranks.size} ranks"])
        unlike = self._unlike(loaded, options, make_cache)
        measured = self._measured(loaded, key, options, layouts, unlike)
        found, curve, limits = measured.probe, measured.curve, self._agreed_limits()
        fixed, prefixes = None, self._shared_prefix_cache()
        policy = PrefixCachePolicy(prefixes, model, kv, make_cache, unlike)
        drafts = Drafts()
        if options.reproducible:
            fixed = Reproducible.of(model, make_cache, found, limits)
            limits = fixed.limits(limits)
            # a stored prefix is to be what is computed here, by this software on this device
            policy = WholePasses(prefixes, model, f"{kind}, {key}", make_cache, fixed.shapes)
        elif found.drafts:
            drafts = self.ranks.alone(partial(self._drafts, loaded, options), Drafts())
        guessing = drafts.speculation.drafting if drafts.speculation else None
        sparse = sparse_prefill_of(options, model, make_cache, found, guessing, drafts.drafter)
        each = measured.passes or measure(model, make_cache, curve, unlike) or PassBytes()
        passes = PassMemory.of(each, curve, IDLE_STALL_SECONDS, limits.max_chunk)
        shapes = fixed.shapes if fixed else None
        engine = Engine(
            model,
            Scheduler(
                limits,
                self._budget(loaded, kind, found.memory, passes, fixed),
                Costs(curve),
                grid=GRID if found.memory.recurrent else 1,
                fixed=shapes,
            ),
            layout=found.layout,
            mixes=found.mixes,
            fixed=shapes,
            make_cache=make_cache,
            recorder=self._recorder,
            prefix_cache=policy,
            features=loaded.features,
            speculation=drafts.speculation,
            sparse_prefill=sparse,
            agreed=self.ranks.agreed.named(engine_name(loaded, kind)),
            unlike=unlike,
        )
        self._worker.add(engine)
        running = Running(engine, found, fixed, drafts.drafter, drafts.nbytes)
        self._tell(loaded, running, kv)
        return running

    def _drafts(self, loaded: Loaded, options: ModelOptions) -> Drafts:
        room = (self.pool.free - self._live()) // 2  # the rest is for rows
        whole = self.ranks.size == 1
        return drafts_of(self._registry, loaded.folder, loaded.model, options, room, whole=whole)

    def _tell(self, loaded: Loaded, running: Running, kv: str) -> None:
        """In the log, how rows decode and why not better."""
        found, fixed = running.probe, running.reproducible
        for note in (*loaded.info.notes, *running.notes):
            log.warning("%s: %s", loaded.name, note)
        how = (
            fixed_passes(fixed.told)
            if fixed
            else batching(found.layout, found.mixes, found.noise_floor)
        )
        drafts = running.drafter and f", drafts by {running.drafter}"
        part = running.engine.sparse_prefill
        sparse = "" if part is None else f", {part.told}"
        log.info("%s: %s%s%s%s", loaded.name, how, drafts, sparse, kv and f", KV in {kv}")

    def _unlike(
        self, loaded: Loaded, options: ModelOptions, make_cache: MakeCache
    ) -> Unlike | None:
        """What the ranks have in common, where they keep unlike parts of a row."""
        if self.ranks.size == 1:
            return None
        check_kv(loaded.model, options, self.ranks.agreed)
        return unlike(loaded.model, make_cache, self.ranks.agreed)

    def _measured(
        self,
        loaded: Loaded,
        key: str,
        options: ModelOptions,
        layouts: Sequence[str],
        unlike: Unlike | None,
    ) -> Measured:
        """What was measured in the same circumstances before, else what is measured here."""
        agreed = self.ranks.agreed
        known = agreed.on("known", partial(self._measurements.find, key), _dumped, _read)
        if known is not None:
            return known
        if self.ranks.size == 1:
            check_kv(loaded.model, options)
        found = tried(loaded.model, options, layouts, agreed, unlike)
        make_cache = cache_maker(loaded.model, options)
        curve = calibrate(loaded.model, make_cache, agreed)
        passes = measure(loaded.model, make_cache, curve, unlike)
        own = Measured(found, curve, passes, str(loaded.folder), kv_kind(options), software())
        measured = agreed.on("measured", lambda: own, _dumped, _read) or own
        if not agreed.follows:
            self._measurements.keep(key, measured)
        return measured

    # -- memory

    def _limits(self) -> Limits:
        s = self._settings
        return Limits(s.max_rows, s.max_queue, s.stall_target, s.max_chunk, s.output_reserve)

    def _agreed_limits(self) -> Limits:
        """Those of rank 0's settings."""
        return self.ranks.agreed.on("limits", self._limits, asdict, lambda told: Limits(**told))

    @property
    def _pool_limit(self) -> int:
        """Bytes of freed buffers that MLX may keep."""
        return pool_limit(memory_limit(self._settings.memory_limit))

    def _limit(self) -> int:
        """Bytes for weights, rows with their passes, and the prefix cache."""
        own, least = memory_limit(self._settings.memory_limit), self.ranks.memory_limit
        return (own if least is None else min(own, least)) - self._pool_limit

    def _budget(
        self,
        loaded: Loaded,
        kind: str,
        memory: MemoryProfile,
        passes: PassMemory,
        fixed: Reproducible | None,
    ) -> Budget:
        return Budget(
            passing=fixed.passing(passes, memory.state_bytes) if fixed else passes,
            row_bytes=memory.row_bytes,
            available=partial(self._available, loaded, kind),
            reclaim=partial(self._reclaim, loaded, kind),
            alone=partial(self.pool.alone, loaded.key),
            others_go_on=partial(self.pool.others_go_on, loaded.key),
            beside=self._beside,
        )

    def _live(self, apart: Running | None = None) -> int:
        """Bytes set aside for rows, of all engines or of all others."""
        return sum(e.engine.scheduler.live_bytes for e in self.engines() if e is not apart)

    def _available(self, loaded: Loaded, kind: str) -> int:
        """Bytes for rows of one engine: what weights and the rows of others leave."""
        return self.pool.free - self._live(apart=loaded.running.get(kind))

    def _reclaim(self, loaded: Loaded, kind: str, need: int) -> None:
        """Unload idle models, then shrink the prefix cache, so that rows may hold `need` bytes."""
        own = loaded.running[kind]
        live = own.engine.scheduler.live_bytes
        stuck = need <= live or not live  # rows have outgrown their room, or none can begin
        leaving = self.pool.make_way(loaded.key, need, self._live(apart=own), stuck=stuck)
        for resident, model in leaving:
            self.loading.unload_here(model)
            self.pool.left(resident)
        left = self._available(loaded, kind) - need
        if left >= 0:
            self.evict_to(left)

    def _outlined(self) -> PrefixCacheFigures:
        kept = self._prefix_cache
        return NO_PREFIXES if kept is None else kept.figures()

    def _shared_prefix_cache(self) -> PrefixCache:
        """The one of this process, made on the engine thread that will own it."""
        if self._prefix_cache is None:
            s = self._settings
            # what one rank finds on its disk another may not
            kept = s.disk_cache if self.ranks.size == 1 else None
            disk = DiskTier(kept, s.disk_cache_bytes) if kept else None
            agreed = self.ranks.agreed
            self._prefix_cache = PrefixCache(
                budget=self._prefix_cache_budget, disk=disk, agreed=agreed
            )
        return self._prefix_cache

    def _prefix_cache_budget(self) -> int:
        """Bytes that weights and live rows leave to the prefix cache."""
        free, chosen = max(0, self.pool.free), self._settings.prefix_bytes
        if chosen is None:
            chosen = max(int(PREFIX_SHARE * free), min(PREFIX_LEAST, free // 2))
        return max(0, min(free - self._live() - self._beside(), chosen))

    def _shrink_prefix_cache(self) -> None:
        if self.ranks.agreed.follows:
            return  # by rank 0's memory, which has told what goes
        self.evict_to(self._prefix_cache_budget())

    def forget_prefixes(self) -> None:
        """Empty the prefix cache (engine thread)."""
        if self._prefix_cache is not None:
            self._prefix_cache.clear()

    def evict_to(self, to: int) -> None:
        """Shrink the prefix cache (engine thread)."""
        if self._prefix_cache is not None and self._prefix_cache.evict_to(to):
            self._recorder.evicted(1)


def engine_name(loaded: Loaded, kind: str) -> str:
    """By which the ranks name an engine."""
    return f"{loaded.number} {kind}"


def _told(loaded: Loaded, kind: str, options: ModelOptions) -> dict[str, Any]:
    return {"model": loaded.number, "choice": kind, "options": options.model_dump(mode="json")}


def _dumped(measured: Measured | None) -> Any:
    return MEASURED.dump_python(measured, mode="json")


def _read(told: Any) -> Measured | None:
    return MEASURED.validate_python(told)


def _too_long(options: ModelOptions) -> Forbidden:
    """Each longer context makes other weights of a model."""
    return Forbidden(
        f"context_length {options.context_length} is beyond the model's own: grant it where the "
        "engine runs, in its owner's models file (MLX_PROVIDER_MODELS_FILE)",
        param="options.context_length",
    )


def _rendered(model: LoadedModel, messages: list[dict[str, Any]]) -> str:
    fitted = fit_messages(messages, model.info.template)
    return model.prepare(fitted, tools=[], media=[], variables={}).text
