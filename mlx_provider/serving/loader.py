"""Loads weights from a folder into memory, selects their kernels, and unloads them completely."""

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..chat.constraints.compiler import GrammarCompiler
from ..chat.constraints.schema import choose_whitespace
from ..engine.inputs import FeatureCache
from ..engine.worker import EngineWorker
from ..errors import (
    BadRequest,
    LoadFailed,
    MLXProviderError,
    PluginError,
    for_another,
    wrong_option,
)
from ..families.checkpoint import named_template, read_json
from ..families.tokenizer.template_probe import try_template
from ..isolation import LOG_HINT, Fault, attempt
from ..protocol.requests import ModelOptions
from ..records import (
    Function,
    LoadedModel,
    LoadOptions,
    ModelFamily,
    ModelInfo,
    Replacement,
    SamplingDefaults,
)
from ..registry import Plugin, PluginRegistry
from ..upstream.patching import namespaces, patch, unpatch
from .load_queue import LoadPlan
from .residents import MemoryLedger
from .stats import LoadProgress
from .weight_files import check_folder, weights_dtype, weights_estimate, wire
from .weights import Weights, WeightsKey

DEFAULT_SAMPLING = SamplingDefaults(temperature=0.7, top_p=0.95)
"""At temperature 1, small models answer nonsense."""
log = logging.getLogger(__name__)
MASK_THREADS = 2
"""Threads that compute grammar masks in parallel with the device's step."""
LARGE_VOCABULARY = 1 << 15
"""From this size, the vocabulary for grammars is built at load; a smaller one is quick."""


@dataclass(frozen=True)
class _Job:
    key: WeightsKey
    family: ModelFamily
    plugin: Plugin
    options: LoadOptions
    name: str


@dataclass(frozen=True)
class Loader:
    _registry: PluginRegistry
    _worker: EngineWorker
    _ledger: MemoryLedger
    _shrink_prefix_cache: Callable[[], None]
    """Engine thread: evicts prefixes from memory that is reserved for weights."""
    _progress: LoadProgress
    _feature_bytes: int
    _mask_pool: Executor = field(
        default_factory=partial(ThreadPoolExecutor, MASK_THREADS, thread_name_prefix="mlx-masks")
    )
    _grammar_pool: Executor = field(
        default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="mlx-grammars")
    )
    _loaded: set[Weights] = field(default_factory=set)

    def close(self) -> None:
        self._mask_pool.shutdown(wait=False)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)

    def plan(self, key: WeightsKey, options: ModelOptions, name: str) -> LoadPlan:
        """A load, and the bytes that it will take. `name`: the model's name in logs and metrics,
        because a folder's own name says little (`model`, a revision). Raises `BadRequest` for a
        folder that no family serves."""
        check_folder(key.folder, key.adapter)
        family, plugin = self._registry.family_for(read_json(key.folder / "config.json"))
        as_float32 = weights_estimate(key.folder, key.adapter, expanded=4)
        dtype = weights_dtype(key.dtype, as_float32, self._ledger.limit)
        chosen = LoadOptions(
            adapter=key.adapter,
            trust_remote_code=options.trust_remote_code,
            context_length=key.context_length,
            modality=key.modality,
            dtype=dtype,
            extra=options.extra,
        )
        width = None if dtype is None else getattr(mx, dtype).size
        nbytes = weights_estimate(key.folder, key.adapter, expanded=width)
        job = _Job(key, family, plugin, chosen, name)
        return LoadPlan(name, nbytes, partial(self._load, job, nbytes))

    def unload(self, weights: Weights) -> None:
        """Blocks until the weights are freed."""
        self._worker.call(partial(self.unload_here, weights)).result()

    def unload_here(self, weights: Weights) -> None:
        """Release a model (engine thread)."""
        before = mx.get_active_memory()
        self._stop(weights)
        self._loaded.remove(weights)
        wire(sum(model.loaded_bytes for model in self._loaded))
        weights.drop()
        _collect()
        freed = before - mx.get_active_memory()
        log.info("unloaded %s: %d of %d bytes came back", weights.name, freed, weights.loaded_bytes)

    def _stop(self, weights: Weights) -> None:
        """Separate from `unload_here`, whose frame must not keep the engine alive."""
        if (instance := weights.started) is not None:
            self._worker.remove(instance.engine)
            instance.keep_curve()

    def _load(self, job: _Job, nbytes: int) -> Weights:
        began, before = time.monotonic(), mx.get_active_memory()
        count_loaded = lambda: mx.get_active_memory() - before  # noqa: E731
        with self._progress.stage(job.name, "weights", count_loaded, nbytes, "bytes"):
            if template := named_template(job.key.folder):
                try_template(template)
            weights = self._worker.call(partial(self._load_here, job)).result()
        log.info(
            "loaded %s in %.1f s: family %s, %d bytes",
            weights.name, time.monotonic() - began, weights.family, weights.nbytes,
        )  # fmt: skip
        return weights

    def _load_here(self, job: _Job) -> Weights:
        self._worker.end_background()
        self._shrink_prefix_cache()
        before = mx.get_active_memory()
        made = _load_isolated(job)
        if isinstance(made, MLXProviderError):
            _collect()
            raise made
        equip(made, self._registry)
        key, loaded_bytes = job.key, mx.get_active_memory() - before
        weights = Weights(
            key=key,
            name=job.name if key.adapter is None else f"{job.name} with {key.adapter}",
            family=job.family.name,
            plugin=job.plugin.name,
            info=with_sampling(made.info, job.family),
            code=self._registry.computing(job.plugin),
            third_party=third_party_of(job.plugin),
            loaded_bytes=loaded_bytes,
            features=FeatureCache(self._feature_bytes),
            grammar=_grammar_of(made, self._mask_pool, self._grammar_pool),
            _model=made,
        )
        self._loaded.add(weights)
        wire(sum(model.loaded_bytes for model in self._loaded))
        return weights


def _load_isolated(job: _Job) -> LoadedModel | MLXProviderError:
    """The model, or an error without the frames of the load, which keep weights alive."""
    family, plugin = job.family, job.plugin

    def load() -> LoadedModel | PluginError:
        made = family.load(job.key.folder, job.options)
        if isinstance(getattr(made, "info", None), ModelInfo):
            return made
        kind = type(made).__name__
        return PluginError(f"plugin {plugin}: load of {family.name!r} gave {kind}, no LoadedModel")

    result = attempt(load)
    if not isinstance(result, Fault):
        return result
    trusted, third_party = job.options.trust_remote_code, third_party_of(plugin)
    return load_error(result, job.name, family.name, trusted=trusted, third_party=third_party)


def load_error(
    fault: Fault, name: str, family: str, *, trusted: bool, third_party: str
) -> MLXProviderError:
    """The error of a failed load, which names the option that caused the fault, if any.
    `third_party`: the third party's plugin that serves the model."""
    error = fault.error
    known = error if isinstance(error, MLXProviderError) else None
    if known is None:
        log.error("loading %s\n%s", name, fault.trace)
    named = known is not None and (known.param or "").startswith("model_info.")
    if "trust_remote_code" in str(error) and not (trusted or named):
        return wrong_option("trust_remote_code", f"{name} brings code of its own: {error}")
    if known is not None:
        return for_another(known)
    origin = fault.origin  # the fault may be in a drafter or kernels of another plugin
    where = "" if origin is None else f", {origin.called} failed"
    message = f"{name} could not be loaded by family {family!r}{where}: {fault.summary}"
    at_fault = third_party if origin is None or origin.built_in else origin.plugin
    if at_fault and fault.lasting:
        return PluginError(f"plugin {at_fault}: {message}; {LOG_HINT}")
    if isinstance(error, RecursionError):  # from a library that reads a deep tokenizer.json
        return BadRequest(message, param="model")
    return LoadFailed(message)


def third_party_of(plugin: Plugin) -> str:
    """Name and version. Empty for a built-in one."""
    return "" if plugin.built_in else str(plugin)


def with_sampling(info: ModelInfo, family: ModelFamily) -> ModelInfo:
    """If the model's files set no sampling, add what the family knows, else `DEFAULT_SAMPLING`."""
    if info.sampling != SamplingDefaults():
        return info
    published = family.sampling.get(info.model_type)
    sampling = published or DEFAULT_SAMPLING
    by = f"family {family.name} uses the published" if published else "it uses the default"
    chosen = ((name, value) for name, value in vars(sampling).items() if value is not None)
    values = ", ".join(f"{name} {value:g}" for name, value in chosen)
    note = f"the model's files set no sampling: {by} {values}, unless a request sets its own"
    return replace(info, sampling=sampling, notes=(*info.notes, note))


def _grammar_of(made: LoadedModel, masks: Executor, grammars: Executor) -> GrammarCompiler:
    info = made.info
    compiler = GrammarCompiler(
        made.tokenizer.fast,
        info.stop_tokens,
        info.vocab_size,
        pool=masks,
        background=grammars,
        spaces=choose_whitespace(info.chat_template),
    )
    if info.vocab_size >= LARGE_VOCABULARY:
        compiler.prepare()
    return compiler


def _collect() -> None:
    gc.collect()
    mx.clear_cache()


def device_kind() -> str:
    """`cpu`, `metal` or `cuda`."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def equip(loaded: LoadedModel, registry: PluginRegistry) -> str | None:
    """Install the best kernels (engine thread). Returns their name. `None`: none fit or pay.
    Kernels that fail here are logged and removed completely."""
    model: Any = getattr(loaded, "model", None)
    if not isinstance(model, nn.Module):
        return None
    chosen = registry.kernels_for(device_kind(), loaded.info.precision)
    if chosen is None or not chosen[1]:
        return None
    name, replacements = chosen
    installed = attempt(lambda: install(name, replacements, model))
    if isinstance(installed, Fault):
        remove(name, replacements, model)
        log.warning("kernels %s are left out: %s\n%s", name, installed.summary, installed.trace)
        return None
    if installed:
        log.info("it computes with kernels %s", name)
    return name if installed else None


def install(name: str, replacements: Iterable[Replacement], model: nn.Module) -> bool:
    """Replace functions in the modules from which `model`'s layers call them. Idempotent. Returns
    whether it has replaced any."""
    patched = [
        patch(*_owners(r, model), partial(_make_function, r), key=(name, r.name))
        for r in replacements
    ]
    return any(patched)


def remove(name: str, replacements: Iterable[Replacement], model: nn.Module) -> None:
    """Undo `install`, for every model that shares modules with this one."""
    for replacement in replacements:
        unpatch(_owners(replacement, model)[0], (name, replacement.name))


def _make_function(replacement: Replacement, original: Function) -> Function | None:
    """The new function. `None`: `original` is another of that name, or is better."""
    defined = getattr(original, "__module__", ""), getattr(original, "__name__", "")
    if defined != (replacement.module, replacement.name.rpartition(".")[2]):
        return None
    made = replacement.make(original)
    return None if made is original else wraps(original)(made)


def _owners(replacement: Replacement, model: nn.Module) -> tuple[list[Any], str]:
    """The modules or the class in which the function is replaced, and its name there."""
    kind, _, name = replacement.name.rpartition(".")
    if not replacement.in_module:
        return list(namespaces(model)), name
    home: Any = sys.modules.get(replacement.module)
    owner = getattr(home, kind, None) if kind else home
    return [] if owner is None else [owner], name
