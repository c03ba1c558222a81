"""Pipeline parallelism by upstream's split of layers (mlx_lm/models/pipeline.py 0.32.2,
`PipelineMixin`).

Of n processes, process n - 1 has the first layers and process 0 the last ones. Each process runs
its layers on the output of the process before it, and all processes receive the output of process
0. Upstream supports one row and one call at a time. For more, each call differs from upstream in
three points:

- Upstream starts a transfer when a result is evaluated, in an order that depends on the graph. Here
  the call itself starts it, so that all processes have the same order of transfers.
- Upstream ties a send operation to the cache of the last layer, by an attribute that batch caches
  lack. The call starts the transfer anyway, so that upstream gets `None` in place of that cache.
- A process can have only layers with windows or states, while layers of other processes hold all
  tokens. It then has an additional cache with a blank entry for each token, because all processes
  must share and store the same tokens of a row (`engine/prefix_cache/buffers.py`).
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .cache_classes import KVCache, make_prompt_cache
from .file_limit import file_limit_kept
from .shared_kv import Shared

BLANK = 64
"""Width of a blank key or value: a multiple of each group size of a quantised cache."""
CACHE = "cache"
"""The name of the argument of upstream's models for the list of layer caches."""


def pipelined(model: Any) -> Any:
    """The module of `model` that upstream can split into groups of layers.

    Raises `ValueError` if there is none.
    """
    with file_limit_kept():
        from mlx_lm.models.pipeline import PipelineMixin

    found = [part for part in model.modules() if isinstance(part, PipelineMixin)]
    if not found:
        raise ValueError("upstream has no pipeline for it")
    if hasattr(found[0], "make_cache"):  # its caches depend on each other; rows cannot share them
        raise ValueError("the caches of its layers hang on one another")
    return found[0]


def split(model: Any, group: Any) -> None:
    """Remove the layers of other processes from `model`.

    Raises `ValueError` if upstream cannot split it, or if it has too few layers.
    """
    part, kept = pipelined(model), _keeps_tokens(model)
    if len(part.layers) < group.size():
        raise ValueError(f"its {len(part.layers)} layers are fewer than the processes")
    part.pipeline(group)
    _mix(part, _InOrder)
    if kept and not _keeps_tokens(model):
        _mix(model, _Blanks)


def layers_of(model: Any) -> range:
    """The indices of the layers of `model` that `split` has kept."""
    part = pipelined(model)
    return range(part.start_idx, part.end_idx)


def _keeps_tokens(model: Any) -> bool:
    """Whether a layer holds all tokens."""
    return any(type(layer) is KVCache for layer in make_prompt_cache(model))


def _mix(part: Any, into: type[nn.Module]) -> None:
    """Add a mixin to the class of a part of a model."""
    kind = type(part)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    part.__class__ = type(kind.__name__, (into, kind), own)


class _Blanks(nn.Module):
    """A mixin for a model none of whose layers in this process holds all tokens."""

    def make_cache(self) -> list[Any]:
        inner: Any = super()
        return [*inner.make_cache(), KVCache()]


class _InOrder(nn.Module):
    """A mixin for the module that is split."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        call, count = super().__call__, len(self.pipeline_layers)
        given = signature(call).bind(*args, **kwargs)
        caches = given.arguments.get(CACHE)
        if caches is not None:
            given.arguments[CACHE] = [*caches[:count], None]
        hidden: mx.array = call(*given.args, **given.kwargs)
        rows, tokens, _ = hidden.shape
        blank = mx.zeros((rows, 1, tokens, BLANK), mx.float16)
        behind = [each.update_and_fetch(blank, blank) for each in (caches or [])[count:]]
        flat = [each for _, each in tree_flatten(behind)]
        found = [each.tail if isinstance(each, Shared) else each for each in flat]
        mx.async_eval(hidden, found)  # type: ignore[no-untyped-call]
        return hidden
