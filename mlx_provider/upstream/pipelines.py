"""Upstream's split of a model layer by layer (mlx_lm/models/pipeline.py 0.32.2, `PipelineMixin`).

Process n - 1 has the first layers. Each calls its own on what the one above it sends, and all
gather what process 0, which has the last ones, comes to. Upstream is made for one row and one call
at a time, so two things are done here at each call:

- Transfers are launched by whoever evaluates a call, in an order that hangs on its own
  graph. Here they are launched by the call itself, so that all processes have them in one order.
- What a process sends is tied to its last layer's cache by an attribute that caches of several rows
  do not have. It is launched here anyway, so a blank behind the caches takes that cache's place.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .file_limit import file_limit_kept

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


def split(part: Any, group: Any) -> None:
    """Leave this process's layers in `part`, which `pipelined` has found.

    Raises `ValueError` where the layers do not suffice.
    """
    if len(part.layers) < group.size():
        raise ValueError(f"its {len(part.layers)} layers are fewer than the processes")
    part.pipeline(group)
    kind = type(part)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    part.__class__ = type(kind.__name__, (_InOrder, kind), own)


def layers_of(model: Any) -> range:
    """The layers of `model` that `split` has left."""
    part = pipelined(model)
    return range(part.start_idx, part.end_idx)


class _InOrder(nn.Module):
    """Mixed into the class of a part that is split."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        call = super().__call__
        given = signature(call).bind(*args, **kwargs)
        if given.arguments.get(CACHE) is not None:
            given.arguments[CACHE] = [*given.arguments[CACHE], None]
        hidden: mx.array = call(*given.args, **given.kwargs)
        mx.async_eval(hidden)  # type: ignore[no-untyped-call]
        return hidden
