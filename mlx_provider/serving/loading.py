"""From a folder to weights in memory, and back: what the device had before is free again."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from pydantic import TypeAdapter

from ..chat.constraints.compiler import GrammarCompiler
from ..chat.constraints.literal import spaces_of
from ..engine.feature_cache import FeatureCache
from ..engine.worker import EngineWorker
from ..errors import (
    BadRequest,
    LoadFailed,
    MLXProviderError,
    PluginError,
    for_another,
    wrong_option,
)
from ..families.checkpoint import read_json
from ..families.estimate import DTYPE_BYTES
from ..isolation import LOG, Fault, Isolation
from ..protocol.options import ModelOptions
from ..records import LoadedModel, LoadOptions, ModelFamily, ModelInfo
from ..registry import Plugin, PluginRegistry
from .folder_check import check_folder
from .hub import folder_of
from .kernels import equip
from .model_pool import Plan
from .sampling import with_sampling
from .served import Loaded
from .split import WHOLE, Ranks
from .weight_files import weights_dtype, weights_estimate

log = logging.getLogger(__name__)

_OPTIONS = TypeAdapter(LoadOptions)

BACK = 0.9
"""Share of its bytes that an unloaded model must give back, or it is told."""

LARGE_VOCABULARY = 1 << 15
"""Rows from which a vocabulary for grammars is built at load; a smaller one takes milliseconds."""


@dataclass(frozen=True)
class WeightsKey:
    """What makes weights other weights; every name and option beside it shares them."""

    folder: Path
    """Without links: a Hub id, a path and a link to it are one."""
    adapter: Path | None
    trust_remote_code: bool
    modality: Literal["auto", "text"]
    dtype: str
    extra: str
    """As JSON."""
    context_length: int | None = None
    """Only where it is longer than the model's own, which a family may have to prepare for."""

    @classmethod
    def of(cls, folder: Path, options: ModelOptions) -> WeightsKey:
        """Raises `BadRequest` where the adapter is no folder."""
        return cls(
            folder.resolve(),
            _adapter(options),
            options.trust_remote_code,
            options.modality,
            options.dtype,
            options.model_dump_json(include={"extra"}),
        )


def _adapter(options: ModelOptions) -> Path | None:
    if not options.adapter:
        return None
    folder = Path(options.adapter).expanduser()
    if not folder.is_dir():
        raise wrong_option("adapter", f"no folder {options.adapter!r} on the engine's machine")
    return folder.resolve()


_KEY = TypeAdapter(WeightsKey)


class Loading:
    """Loads by the family of a plugin. Its engine-thread methods are named so."""

    def __init__(
        self,
        registry: PluginRegistry,
        worker: EngineWorker,
        *,
        feature_bytes: int,
        mask_pool: Executor,
        shrink_prefix_cache: Callable[[], None],
        limit: Callable[[], int],
        ranks: Ranks = WHOLE,
    ) -> None:
        """`limit`: bytes that all models and rows may take. `shrink_prefix_cache` (engine thread):
        leave the room that weights have reserved."""
        self._registry = registry
        self._worker = worker
        self._feature_bytes = feature_bytes
        self._mask_pool = mask_pool
        self._shrink_prefix_cache = shrink_prefix_cache
        self._limit = limit
        self._ranks = ranks
        self._loads = 0
        """By which the ranks name a model."""

    def plan(self, key: WeightsKey, options: ModelOptions, name: str) -> Plan[Loaded]:
        """What loading will take. Raises `BadRequest` for a folder that no family serves.

        `name`: as the model was asked for, by which other machines find it.
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
            group=self._ranks.group,
        )
        nbytes = weights_estimate(
            key.folder, key.adapter, expanded=None if dtype is None else DTYPE_BYTES[dtype]
        )
        return Plan(
            key.folder.name,
            self._ranks.share(nbytes),
            partial(self._load, key, family, plugin, chosen, name),
        )

    def _family(self, key: WeightsKey) -> tuple[ModelFamily, Plugin]:
        return self._registry.family_for(read_json(key.folder / "config.json"))

    def unload(self, loaded: Loaded) -> None:
        """Blocks until the weights are gone."""
        self._worker.call(partial(self.unload_here, loaded)).result()

    def unload_here(self, loaded: Loaded) -> None:
        """Let go of a model and see that its bytes come back (engine thread)."""
        self._ranks.agreed.tell("unload", lambda: {"model": loaded.number})
        before = mx.get_active_memory()
        self._stop(loaded)
        loaded.drop()
        _collect()
        back = before - mx.get_active_memory()
        log.info("unloaded %s: %d bytes came back", loaded.name, back)
        if back < BACK * loaded.taken:
            log.warning(
                "%s took %d bytes, of which %d came back: family %r keeps the rest",
                loaded.name, loaded.taken, back, loaded.family,
            )  # fmt: skip

    def _stop(self, loaded: Loaded) -> None:
        for running in loaded.running.values():
            self._worker.remove(running.engine)

    def _load(
        self,
        key: WeightsKey,
        family: ModelFamily,
        plugin: Plugin,
        options: LoadOptions,
        name: str,
    ) -> Loaded:
        began = time.monotonic()
        load = partial(self._load_here, key, family, plugin, options, name)
        loaded = self._worker.call(load).result()
        log.info(
            "loaded %s in %.1f s: family %s, %d bytes",
            loaded.name, time.monotonic() - began, family.name, loaded.nbytes,
        )  # fmt: skip
        return loaded

    def load_share(self, told: Mapping[str, Any]) -> Loaded:
        """This rank's share of what rank 0 loads (engine thread).

        Raises `MLXProviderError`, of which every rank knows.
        """
        self._loads = told["model"] - 1  # what failed on rank 0 or here has a number, too
        options = replace(_OPTIONS.validate_python(told["options"]), group=self._ranks.group)
        with Isolation() as finding:
            key = _key_here(told)
            found = self._family(key)
        if finding.fault is not None:
            error = finding.fault.of_request("finding the model")
            with Isolation():  # the others wait for this rank
                self._ranks.loaded(Path(told["key"]["folder"]), error)
            raise error
        return self._load_here(key, *found, options, told["name"])

    def _load_here(
        self,
        key: WeightsKey,
        family: ModelFamily,
        plugin: Plugin,
        options: LoadOptions,
        name: str,
    ) -> Loaded:
        self._shrink_prefix_cache()
        self._loads += 1
        self._ranks.agreed.tell("load", partial(_told, self._loads, name, key, options))
        self._ranks.loaded(key.folder, None)  # a load runs passes, in which all must take part
        before = mx.get_active_memory()
        made = _tried(key.folder, family, plugin, options)
        with Isolation() as trying:
            self._ranks.loaded(key.folder, made)
        if isinstance(made, MLXProviderError) or trying.fault is not None:
            failed = made if isinstance(made, MLXProviderError) else _unlike(trying.fault)
            del made
            _collect()
            raise failed
        agreed = self._ranks.agreed
        largest = max(agreed.of_all(made.info.weights_bytes))
        remembered = agreed.on("feature budget", lambda: self._feature_bytes, int, int)
        equip(made, self._registry)
        info, taken = with_sampling(made.info, family), mx.get_active_memory() - before
        return Loaded(
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
            grammar=_grammar_of(made, self._mask_pool),
            _model=made,
        )


def _grammar_of(made: LoadedModel, pool: Executor | None) -> GrammarCompiler:
    fast, info = made.tokenizer.fast, made.info
    spaces = spaces_of(info.chat_template)
    compiler = GrammarCompiler(fast, info.stop_tokens, info.vocab_size, pool=pool, spaces=spaces)
    if info.vocab_size >= LARGE_VOCABULARY:
        compiler.prepare()
    return compiler


def _told(number: int, name: str, key: WeightsKey, options: LoadOptions) -> dict[str, Any]:
    """What other ranks are to load."""
    return {
        "model": number,
        "name": name,
        "key": _KEY.dump_python(key, mode="json"),
        "options": _OPTIONS.dump_python(replace(options, group=None), mode="json"),
    }


def _key_here(told: Mapping[str, Any]) -> WeightsKey:
    """The same model on this machine: at the same path, else by its name."""
    key = _KEY.validate_python(told["key"])
    return key if key.folder.is_dir() else replace(key, folder=folder_of(told["name"]))


def _unlike(fault: Fault | None) -> MLXProviderError:
    if fault is not None and isinstance(fault.error, MLXProviderError):
        return fault.error
    return LoadFailed("the ranks could not compare their weights")


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
    return told(trying.fault, folder.name, family.name, trusted=trusted, stranger=stranger)


def stranger_of(plugin: Plugin) -> str:
    """Name and version of a third party's plugin; empty for one of ours."""
    return "" if plugin.ours else str(plugin)


def told(
    fault: Fault | None, name: str, family: str, *, trusted: bool, stranger: str
) -> MLXProviderError:
    """What went wrong with a model, by the option at fault where one is.

    `stranger`: the third party's plugin that serves it, which is to be mended.
    """
    if fault is None:
        return LoadFailed(f"{name} could not be loaded by family {family!r}")
    error = fault.error
    known = error if isinstance(error, MLXProviderError) else None
    if known is None:
        log.error("loading %s\n%s", name, fault.trace)
    named = known is not None and (known.param or "").startswith("model_info.")
    if "trust_remote_code" in str(error) and not (trusted or named):
        return wrong_option("trust_remote_code", f"{name} brings code of its own: {error}")
    if known is not None:
        return for_another(known)
    found = fault.culprit  # a drafter or kernels may be another's
    where = "" if found is None else f", {found.called} failed"
    message = f"{name} could not be loaded by family {family!r}{where}: {fault.told}"
    at_fault = stranger if found is None or found.ours else f"{found.plugin} ({found.distribution})"
    if at_fault and fault.lasting:
        return PluginError(f"plugin {at_fault}: {message}; {LOG}")
    if isinstance(error, RecursionError):  # of a library that reads a deep tokenizer.json
        return BadRequest(message, param="model")
    return LoadFailed(message)


def _collect() -> None:
    """Give back what nobody refers to, rings of references included."""
    gc.collect()
    mx.clear_cache()
