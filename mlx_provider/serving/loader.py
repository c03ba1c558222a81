"""Loads weights from a folder into memory, and unloads them completely."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from pydantic import TypeAdapter

from ..chat.constraints.compiler import GrammarCompiler
from ..chat.constraints.literal import spaces_of
from ..engine.feature_cache import FeatureCache
from ..engine.worker import EngineWorker
from ..errors import LoadFailed, MLXProviderError, PluginError
from ..families.checkpoint import read_json
from ..families.estimate import DTYPE_BYTES
from ..families.tokenizer.template_trial import try_template
from ..isolation import Fault, Isolation
from ..protocol.options import ModelOptions
from ..records import LoadedModel, LoadOptions, ModelFamily, ModelInfo
from ..registry import Plugin, PluginRegistry
from .folder_check import check_folder
from .kernels import equip
from .load_errors import load_error, stranger_of
from .load_line import LoadPlan
from .sampling import with_sampling
from .split import WHOLE, Processes
from .weight_files import weights_dtype, weights_estimate
from .weights import Weights
from .weights_key import WEIGHTS_KEY, WeightsKey, key_here
from .wired_weights import WiredWeights

log = logging.getLogger(__name__)

_OPTIONS = TypeAdapter(LoadOptions)

BACK = 0.9
"""Share of its bytes that an unloaded model must free. Less is logged."""

LARGE_VOCABULARY = 1 << 15
"""From this size, the vocabulary for grammars is built at load. A smaller one takes
milliseconds."""


class Loader:
    """Loads with the family of a plugin. Methods for the engine thread say so."""

    def __init__(
        self,
        registry: PluginRegistry,
        worker: EngineWorker,
        *,
        feature_bytes: int,
        mask_pool: Executor,
        grammar_pool: Executor,
        shrink_prefix_cache: Callable[[], None],
        limit: Callable[[], int],
        wired: WiredWeights,
        processes: Processes = WHOLE,
    ) -> None:
        """`limit`: bytes for all models and rows. `shrink_prefix_cache` (engine thread): free the
        bytes that weights have reserved."""
        self._registry = registry
        self._worker = worker
        self._feature_bytes = feature_bytes
        self._pools = mask_pool, grammar_pool
        self._shrink_prefix_cache = shrink_prefix_cache
        self._limit = limit
        self._wired = wired
        self._processes = processes
        self._loads = 0
        """The number of a model, the same in all processes."""

    def plan(self, key: WeightsKey, options: ModelOptions, name: str) -> LoadPlan[Weights]:
        """The expected memory of a load. Raises `BadRequest` for a folder that no family serves.

        `name`: the model's name in the request, by which other machines find it.
        """
        check_folder(key.folder, key.adapter)
        family, plugin = self._family(key)
        dtype = weights_dtype(
            key.dtype, weights_estimate(key.folder, key.adapter, expanded=4), self._limit()
        )
        chosen = LoadOptions(
            adapter=key.adapter,
            trust_remote_code=options.trust_remote_code,
            context_length=key.context_length,
            modality=key.modality,
            dtype=dtype,
            extra=options.extra,
            group=self._processes.group,
        )
        nbytes = weights_estimate(
            key.folder, key.adapter, expanded=None if dtype is None else DTYPE_BYTES[dtype]
        )
        return LoadPlan(
            key.folder.name,
            self._processes.share(nbytes),
            partial(self._load, key, family, plugin, chosen, name),
        )

    def _family(self, key: WeightsKey) -> tuple[ModelFamily, Plugin]:
        return self._registry.family_for(read_json(key.folder / "config.json"))

    def unload(self, weights: Weights) -> None:
        """Blocks until the weights are freed."""
        self._worker.call(partial(self.unload_here, weights)).result()

    def unload_here(self, weights: Weights) -> None:
        """Release a model and check that its bytes are freed (engine thread)."""
        self._processes.replication.announce("unload", lambda: {"model": weights.number})
        before = mx.get_active_memory()
        self._stop(weights)
        self._wired.leaving(weights.number)
        weights.drop()
        _collect()
        back = before - mx.get_active_memory()
        log.info("unloaded %s: %d bytes came back", weights.name, back)
        if back < BACK * weights.taken:
            log.warning(
                "%s took %d bytes, of which %d came back: family %r keeps the rest",
                weights.name, weights.taken, back, weights.family,
            )  # fmt: skip

    def _stop(self, weights: Weights) -> None:
        for instance in weights.engines.values():
            self._worker.remove(instance.engine)
            instance.learned()

    def _load(
        self,
        key: WeightsKey,
        family: ModelFamily,
        plugin: Plugin,
        options: LoadOptions,
        name: str,
    ) -> Weights:
        began = time.monotonic()
        try_template(key.folder)  # on this thread, so that other models continue
        load = partial(self._load_here, key, family, plugin, options, name)
        weights = self._worker.call(load).result()
        log.info(
            "loaded %s in %.1f s: family %s, %d bytes",
            weights.name, time.monotonic() - began, family.name, weights.nbytes,
        )  # fmt: skip
        return weights

    def load_share(self, order: Mapping[str, Any]) -> Weights:
        """Load this process's share of the model that the leader loads (engine thread).

        Raises `MLXProviderError`, which every process receives.
        """
        self._loads = order["model"] - 1  # a load that failed has a number, too
        options = replace(_OPTIONS.validate_python(order["options"]), group=self._processes.group)
        with Isolation() as finding:
            key = key_here(order)
            found = self._family(key)
        if finding.fault is not None:
            error = finding.fault.of_request("finding the model")
            with Isolation():  # the others wait for this process
                self._processes.loaded(Path(order["key"]["folder"]), error)
            raise error
        return self._load_here(key, *found, options, order["name"])

    def _load_here(
        self,
        key: WeightsKey,
        family: ModelFamily,
        plugin: Plugin,
        options: LoadOptions,
        name: str,
    ) -> Weights:
        self._worker.end_ahead()
        self._shrink_prefix_cache()
        self._loads += 1
        self._processes.replication.announce(
            "load", partial(_load_order, self._loads, name, key, options)
        )
        self._processes.loaded(key.folder, None)  # a load runs passes, which need all processes
        before = mx.get_active_memory()
        made = _tried(key.folder, family, plugin, options)
        with Isolation() as trying:
            self._processes.loaded(key.folder, made)
        if isinstance(made, MLXProviderError) or trying.fault is not None:
            failed = made if isinstance(made, MLXProviderError) else _failed_otherwise(trying.fault)
            del made
            _collect()
            raise failed
        replication = self._processes.replication
        largest = max(replication.gather(made.info.weights_bytes))
        remembered = replication.decide("feature budget", lambda: self._feature_bytes, int, int)
        equip(made, self._registry)
        info, taken = with_sampling(made.info, family), mx.get_active_memory() - before
        self._wired.loaded(self._loads, taken)
        return Weights(
            key=key,
            folder=key.folder,
            name=key.folder.name,
            family=family.name,
            plugin=plugin.name,
            number=self._loads,
            largest=largest,
            info=info,
            code=self._registry.computing(plugin),
            stranger=stranger_of(plugin),
            taken=taken,
            features=FeatureCache(remembered),
            grammar=_grammar_of(made, *self._pools),
            _model=made,
        )


def _grammar_of(made: LoadedModel, masks: Executor, grammars: Executor) -> GrammarCompiler:
    info = made.info
    compiler = GrammarCompiler(
        made.tokenizer.fast,
        info.stop_tokens,
        info.vocab_size,
        pool=masks,
        background=grammars,
        spaces=spaces_of(info.chat_template),
    )
    if info.vocab_size >= LARGE_VOCABULARY:
        compiler.prepare()
    return compiler


def _load_order(number: int, name: str, key: WeightsKey, options: LoadOptions) -> dict[str, Any]:
    """The load order for the other processes."""
    return {
        "model": number,
        "name": name,
        "key": WEIGHTS_KEY.dump_python(key, mode="json"),
        "options": _OPTIONS.dump_python(replace(options, group=None), mode="json"),
    }


def _failed_otherwise(fault: Fault | None) -> MLXProviderError:
    if fault is not None and isinstance(fault.error, MLXProviderError):
        return fault.error
    return LoadFailed("the processes could not compare their weights")


def _tried(
    folder: Path, family: ModelFamily, plugin: Plugin, options: LoadOptions
) -> LoadedModel | MLXProviderError:
    """The model, or an error without the frames of the load, which hold half of its weights."""
    with Isolation() as trying:
        made = family.load(folder, options)
        if isinstance(getattr(made, "info", None), ModelInfo):
            return made
        kind = type(made).__name__
        return PluginError(f"plugin {plugin}: load of {family.name!r} gave {kind}, no LoadedModel")
    trusted, stranger = options.trust_remote_code, stranger_of(plugin)
    return load_error(trying.fault, folder.name, family.name, trusted=trusted, stranger=stranger)


def _collect() -> None:
    """Free unreferenced objects, including reference cycles."""
    gc.collect()
    mx.clear_cache()
