"""How the operator wants a model's KV cache kept, and whether the model can have it so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import mlx.core as mx

from ..engine.execution.probe import Probe, probe
from ..engine.heterogeneous import TRIAL_TOKENS, Heterogeneous
from ..engine.memory import arrays
from ..engine.replication import ONE_PROCESS, Replication
from ..errors import wrong_option
from ..isolation import Isolation
from ..protocol.options import ModelOptions
from ..records import LoadedModel, PrefillChunk, Prompt
from ..upstream import mlx_lm

MakeCache = Callable[[], list[Any]]


def kv_kind(options: ModelOptions) -> str:
    """How the KV cache is kept."""
    return f"{options.kv_bits} bits of {options.kv_group_size}" if options.kv_bits else ""


def engine_kind(options: ModelOptions) -> str:
    """Requests of one kind share a model's engine, and the prefix cache's keys."""
    kinds = (kv_kind(options), "reproducible" if options.reproducible else "")
    return ", ".join(filter(None, kinds))


def cache_maker(model: LoadedModel, options: ModelOptions) -> MakeCache:
    """What makes row caches as they are wanted."""
    if options.kv_bits is None:
        return model.make_cache
    return partial(_quantised, model, options.kv_bits, options.kv_group_size)


def tried(
    model: LoadedModel,
    options: ModelOptions,
    layouts: Sequence[str],
    replication: Replication = ONE_PROCESS,
    heterogeneous: Heterogeneous | None = None,
) -> Probe:
    """What the probe finds with such caches (engine thread); see `probe`.

    Raises `BadRequest` that names the option with which the model does not run.
    """
    make_cache = cache_maker(model, options)
    if options.kv_bits is None:
        return probe(model, make_cache, layouts, replication, heterogeneous)
    with Isolation() as trying:
        return probe(model, make_cache, layouts, replication, heterogeneous)
    reason = trying.fault.told if trying.fault is not None else ""
    why = f"this model does not run with a quantised KV cache ({reason}): leave kv_bits out"
    raise wrong_option("kv_bits", why)


def check_kv(
    model: LoadedModel, options: ModelOptions, replication: Replication = ONE_PROCESS
) -> None:
    """Raises `BadRequest` where heads cannot be quantised as asked (every rank's engine thread)."""
    if options.kv_bits is not None:
        every = replication.gather(sorted(_head_sizes(model)))
        _check_group({size for sizes in every for size in sizes}, options.kv_group_size)


def _quantised(model: LoadedModel, bits: int, group: int) -> list[Any]:
    return mlx_lm.quantised(model.make_cache(), bits, group)


def _head_sizes(model: LoadedModel) -> set[int]:
    """Values per head that the layers keep which would be quantised."""
    cache = model.make_cache()
    tokens = [token % model.info.vocab_size for token in range(1, TRIAL_TOKENS + 1)]
    model.prefill(PrefillChunk(Prompt(tokens), 0, TRIAL_TOKENS, cache))
    mx.eval(arrays(cache))
    return {array.shape[-1] for layer in mlx_lm.quantisable(cache) for array in arrays([layer])}


def _check_group(sizes: set[int], group: int) -> None:
    choices = get_args(ModelOptions.model_fields["kv_group_size"].annotation)
    if any(size % group for size in sizes):
        fit = [str(each) for each in choices if not any(size % each for size in sizes)]
        raise wrong_option(
            "kv_group_size",
            f"{group} does not divide the size of this model's heads "
            f"({', '.join(map(str, sorted(sizes)))}); "
            + (f"{' and '.join(fit)} would" if fit else "no size does: leave kv_bits out"),
        )
