"""Builds an engine on the weights of a model: KV cache, probe, measurements, drafters, start."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from ..engine.engine import Engine
from ..engine.execution.sampler import compiles
from ..engine.prefix_cache.policy import PrefixCachePolicy
from ..engine.row_cache import arrays
from ..engine.scheduling.chunking import GRID, LONGEST_GAP, PassMemory
from ..engine.scheduling.costs import Costs
from ..engine.scheduling.ledger import Limits
from ..engine.scheduling.scheduler import Scheduler
from ..engine.step_output import Recorder
from ..engine.worker import EngineWorker
from ..errors import wrong_option
from ..isolation import Fault, attempt, plugin_call
from ..protocol.requests import ModelOptions
from ..records import LoadedModel, PrefillChunk, Prompt
from ..registry import PluginRegistry
from ..settings import EngineSettings
from ..upstream import mlx_lm
from .calibration import Measured, calibrate, compile_kernels
from .drafting import UNNAMED, LoadedDrafters, load_drafters, sparse_prefill_of
from .loader import load_error
from .measurements import Measurements, batching, circumstances, fixed_passes
from .probe import Probe, Reserve, probe, unlimited
from .reproducible import Reproducible
from .row_ledger import ProcessMemory, RowLedger
from .solo_rows import MakeCache
from .stats import LoadProgress
from .weights import EngineInstance, Weights, kv_kind

log = logging.getLogger(__name__)

COPIES = 8
"""Rows share a prefix if so many copies of it would fill the free memory."""
COMPILING, COMPILED = "compiling kernels, once on this machine", "loading compiled kernels"
NOT_EVERYWHERE = ("bfloat16", "float16")
"""Dtypes in which some devices cannot run every layer (experts on a CPU, mlx 0.32.4)."""
TRIAL_TOKENS = 4
GROUPS = (64, 32)
"""Values of quantised KV per scale. The first that divides every head size is used."""


@dataclass(frozen=True)
class _KVCache:
    make_cache: MakeCache
    name: str
    """Part of keys: kind of KV, and a digest of third-party code. Empty: neither."""
    layouts: Sequence[str]  # best first
    key: str  # key of the stored measurements on this device


@dataclass(frozen=True)
class EngineBuilder:
    _settings: EngineSettings
    _registry: PluginRegistry
    _worker: EngineWorker
    _recorder: Recorder
    _memory: ProcessMemory
    _progress: LoadProgress

    @property
    def _measurements(self) -> Measurements:
        return Measurements.at(self._settings.measurements)

    def start(self, weights: Weights, options: ModelOptions) -> None:
        """Probe the model and start its engine, unless it runs (engine thread). Raises errors of
        `mlx_provider.errors`."""
        if weights.started is not None:
            return
        built = attempt(lambda: self._build(weights, options))
        if not isinstance(built, Fault):
            weights.started = built
            return
        if options.dtype in NOT_EVERYWHERE and not built.deliberate:
            remedy = f"{weights.name} does not run in {options.dtype} here; leave it at auto"
            raise wrong_option("dtype", f"{remedy} ({built.summary})")
        trusted, third_party = options.trust_remote_code, weights.third_party
        raise load_error(
            built, weights.name, weights.family, trusted=trusted, third_party=third_party
        )

    def _build(self, weights: Weights, options: ModelOptions) -> EngineInstance:
        kv = self._kv_cache(weights, options)
        together = options.sparse_prefill is not None or options.drafter not in UNNAMED
        stored = self._measure(weights, kv, options)
        measured = stored.choose_layout(together=together)
        s, found, fixed = self._settings, measured.probe, None
        limits = Limits(s.max_rows, s.max_queue, s.stall_target, s.max_chunk, s.output_reserve)
        if options.reproducible:
            reserve = self._memory.reserve
            fixed = Reproducible.of(weights.model, kv.make_cache, found, limits, reserve)
            limits = replace(limits, max_chunk=fixed.shapes.tokens)
        loaded = LoadedDrafters()
        if found.drafts and fixed is None:
            ledger = self._memory.ledger
            room = (ledger.free - ledger.live_bytes()) // 2  # the rest is for rows
            loaded = load_drafters(self._registry, weights.key.folder, weights.model, options, room)
        policy = self._policy(weights, options, kv, measured, fixed)
        scheduler = Scheduler(
            self._row_ledger(weights, measured, limits, fixed),
            Costs(measured.curve),
            grid=GRID if found.memory.recurrent else 1,
            fixed=fixed.shapes if fixed else None,
            prefixes=policy,
        )
        engine = Engine(
            weights.model,
            scheduler,
            layout=found.layout,
            mixes=found.mixes,
            make_cache=kv.make_cache,
            recorder=self._recorder,
            prefix_cache=policy,
            features=weights.features,
            speculation=loaded.speculation,
            sparse_prefill=sparse_prefill_of(options, weights.model, kv.make_cache, found, loaded),
        )
        self._worker.add(engine)

        def keep_curve() -> None:
            as_measured = fixed is None and found.layout == stored.probe.layout
            if as_measured and (curve := scheduler.costs.curve) != stored.curve:
                log.info("%s: the corrected times are kept for the next load", weights.name)
                self._measurements.keep(kv.key, replace(stored, curve=curve))

        instance = EngineInstance(engine, found, fixed, loaded.drafter, loaded.nbytes, keep_curve)
        _log_started(weights, instance, kv_kind(options))
        return instance

    def _kv_cache(self, weights: Weights, options: ModelOptions) -> _KVCache:
        model, chosen = weights.model, self._settings.kv_layout
        layouts = list(model.kv_layouts) if chosen == "auto" else [chosen]
        make_cache = cache_maker(model, options.kv_bits)
        plugins = [f"{p} {self._registry.sources(p)}" for p in self._registry.plugins]
        name = " ".join(filter(None, (kv_kind(options), weights.code)))
        return _KVCache(make_cache, name, layouts, circumstances(weights, name, layouts, plugins))

    def _policy(
        self,
        weights: Weights,
        options: ModelOptions,
        kv: _KVCache,
        measured: Measured,
        fixed: Reproducible | None,
    ) -> PrefixCachePolicy:
        found, ledger = measured.probe, self._memory.ledger
        # sparse prefill moves rows to other caches
        in_place = fixed is None and options.sparse_prefill is None
        shared = None
        if in_place and found.shares:  # it is faster, or memory is short
            free = max(0, ledger.free - ledger.live_bytes())
            copies = free // (COPIES * max(1, found.memory.token_bytes))
            shared = max(1, min(measured.least_shared, copies))
        return PrefixCachePolicy(
            self._memory.prefixes.cache(),
            weights.model,
            # a prefix of a reproducible model must be computed here, by this software and device
            f"{weights.key.kind}, {kv.key}" if fixed else kv.name,
            kv.make_cache,
            in_place=in_place,
            min_shared=shared,
            memory=found.memory,
            shapes=fixed.shapes if fixed else None,
        )

    def _row_ledger(
        self, weights: Weights, measured: Measured, limits: Limits, fixed: Reproducible | None
    ) -> RowLedger:
        memory, longest = measured.probe.memory, max(limits.stall_target, LONGEST_GAP)
        passes = PassMemory.of(measured.passes, measured.curve, longest, limits.max_chunk)
        passing = fixed.passing(passes, memory.state_bytes) if fixed else passes
        return RowLedger(limits, self._memory, weights, memory, passing)

    def _measure(self, weights: Weights, kv: _KVCache, options: ModelOptions) -> Measured:
        model, make_cache, reserve = weights.model, kv.make_cache, self._memory.reserve
        known = self._measurements.find(kv.key)
        if compiles():
            kernels = COMPILED if known else COMPILING
            log.info("%s: %s", weights.name, kernels)
            with self._progress.stage(weights.name, kernels):
                compile_kernels(model, make_cache, reserve)
        if known is not None:
            return known
        stage = partial(self._progress.stage, weights.name, total=2)
        with stage("measuring how rows decode together", lambda: 1):
            found = probe_layouts(model, make_cache, options.kv_bits, kv.layouts, reserve)
        with stage("measuring the time and memory of passes", lambda: 2):
            measured = calibrate(model, make_cache, found, reserve)
        self._measurements.keep(kv.key, measured)
        return measured


def _log_started(weights: Weights, instance: EngineInstance, kv: str) -> None:
    found, fixed = instance.probe, instance.reproducible
    for note in (*weights.info.notes, *instance.notes):
        log.warning("%s: %s", weights.name, note)
    how = batching(found.layout, found.mixes, found.noise_floor)
    if fixed:
        how = fixed_passes(fixed.summary)
    drafts = instance.drafter and f", drafts by {instance.drafter}"
    part = instance.engine.sparse_prefill
    sparse = part and f", {part.share:g} of prompts from {part.least} tokens on"
    log.info("%s: %s%s%s%s", weights.name, how, drafts, sparse or "", kv and f", KV in {kv}")


def cache_maker(model: LoadedModel, bits: int | None) -> MakeCache:
    """What makes the cache of a row, with KV in `bits` bits if given (engine thread). Raises
    `BadRequest` if no group divides the heads."""
    if bits is None:
        return model.make_cache
    sizes = _head_sizes(model)
    for group in GROUPS:
        if not any(size % group for size in sizes):
            return lambda: mlx_lm.quantise_cache(model.make_cache(), bits, group)
    raise wrong_option(
        "kv_bits",
        f"the size of this model's heads ({', '.join(map(str, sorted(sizes)))}) is no multiple of "
        f"{GROUPS[-1]}, the smallest group of values with one scale: leave kv_bits out",
    )


def probe_layouts(
    model: LoadedModel,
    make_cache: MakeCache,
    bits: int | None,
    layouts: Sequence[str],
    reserve: Reserve = unlimited,
) -> Probe:
    """See `probe` (engine thread). Raises `BadRequest` with the option that does not run."""
    if bits is None:
        return probe(model, make_cache, layouts, reserve)
    why = "this model does not run with a quantised KV cache ({}): leave kv_bits out"
    return plugin_call(
        lambda: probe(model, make_cache, layouts, reserve),
        lambda fault: wrong_option("kv_bits", why.format(fault.summary)),
    )


def _head_sizes(model: LoadedModel) -> set[int]:
    cache = model.make_cache()
    tokens = [token % model.info.vocab_size for token in range(1, TRIAL_TOKENS + 1)]
    model.prefill(PrefillChunk(Prompt(tokens), 0, TRIAL_TOKENS, cache))
    mx.eval(arrays(cache))
    return {array.shape[-1] for layer in mlx_lm.quantisable(cache) for array in arrays([layer])}
