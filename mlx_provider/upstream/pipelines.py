"""Upstream's split of a model layer by layer (mlx_lm/models/pipeline.py 0.32.2, `PipelineMixin`).

Process n - 1 has the first layers. Each calls its own on what the one above it sends, and all
gather what process 0, which has the last ones, comes to. Upstream is made for one row and one call
at a time, so these things are done here at each call:

- Transfers are launched by whoever evaluates a call, in an order that depends on its own
  graph. Here they are launched by the call itself, so that all processes have them in one order.
- What a process sends is tied to its last layer's cache by an attribute that caches of several rows
  do not have. It is launched here anyway, so `None` behind the caches takes that cache's place.
- A process may have layers with windows or states only, while those of others keep every token. One
  more cache behind those of its layers then gets a blank for each token: processes share and store
  the tokens of a row alike (`engine/prefix_cache/buffers.py`).
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
"""Values of a blank key or value: a group of any quantised cache."""
CACHE = "cache"
"""What upstream's models call their argument for one cache a layer."""


def pipelined(model: Any) -> Any:
    """The part of `model` that upstream can split layer by layer.

    Raises `ValueError` where there is none.
    """
    with file_limit_kept():
        from mlx_lm.models.pipeline import PipelineMixin

    found = [part for part in model.modules() if isinstance(part, PipelineMixin)]
    if not found:
        raise ValueError("upstream has no pipeline for it")
    if hasattr(found[0], "make_cache"):  # caches in step, which rows cannot share
        raise ValueError("the caches of its layers hang on one another")
    return found[0]


def split(model: Any, group: Any) -> None:
    """Leave this process's layers in `model`.

    Raises `ValueError` where upstream cannot split it, or its layers do not suffice.
    """
    part, kept = pipelined(model), _keeps_tokens(model)
    if len(part.layers) < group.size():
        raise ValueError(f"its {len(part.layers)} layers are fewer than the processes")
    part.pipeline(group)
    _mix(part, _InOrder)
    if kept and not _keeps_tokens(model):
        _mix(model, _Blanks)


def layers_of(model: Any) -> range:
    """The layers of `model` that `split` has left."""
    part = pipelined(model)
    return range(part.start_idx, part.end_idx)


def _keeps_tokens(model: Any) -> bool:
    """Whether a layer keeps every token."""
    return any(type(layer) is KVCache for layer in make_prompt_cache(model))


def _mix(part: Any, into: type[nn.Module]) -> None:
    """Put a class before that of a part of a model."""
    kind = type(part)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    part.__class__ = type(kind.__name__, (into, kind), own)


class _Blanks(nn.Module):
    """Mixed into the class of a model whose layers in this process keep no token."""

    def make_cache(self) -> list[Any]:
        inner: Any = super()
        return [*inner.make_cache(), KVCache()]


class _InOrder(nn.Module):
    """Mixed into the class of a part that is split."""

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
