"""Attention over rows with separate caches, for models that expect one batch cache.

Models call a module-level `scaled_dot_product_attention(queries, keys, values, cache, scale, mask,
...)` (mlx_lm/models/base.py 0.32.2, mlx_vlm/models/base.py 0.7.10). `route` wraps it in the modules
of a model, and computes each part of `Parts` (several caches) separately.

On a GPU, many queries over a quantised cache use dequantised copies, because upstream's quantised
attention stores every score (queries times keys times heads). On CUDA, all queries do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from ..records import Function, Parts, Run
from .patching import namespaces, patch, unpatch
from .shared_kv import Call, attend_separately, calls_of, dequantise, multiplies_quantised

__all__ = ["Parts", "Run", "route", "route_attention", "watch_attention"]

NAME = "scaled_dot_product_attention"
PARAMETERS = ("scale", "mask", "sinks")
MOST_QUANTISED_QUERIES = 8
"""Maximum number of queries of one row that use quantised keys without a dequantised copy."""
MOST_COPIED_LENGTH = 512
"""Longest cache whose dequantised copies may exist for several layers at once. Metal frees a copy
when its command buffer ends (mlx 0.32.4, backend/metal/eval.cpp); ten buffers can be in flight."""
FUSED_WIDTHS = (64, 80, 128)
"""Head sizes with a fused kernel for more queries (mlx 0.32.4, Metal and CUDA,
`scaled_dot_product_attention.cpp`)."""


def route(model: Any) -> bool:
    """Make the attention functions in the modules of `model`, which all models of its architecture
    share, accept `Parts`. Idempotent. Returns whether any module has such a function."""
    return patch(namespaces(model), NAME, route_attention)


def route_attention(original: Function) -> Function:
    """Like `original`, but accepts `Parts`. Few queries to a shared prefix are computed jointly."""

    @functools.wraps(original)
    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any = None, *args: Any, **kwargs: Any
    ) -> mx.array:
        if isinstance(keys, mx.array):  # in every layer of nearly every pass
            return original(queries, keys, values, cache, *args, **kwargs)  # type: ignore[no-any-return]
        named = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        mask = named.pop("mask", None)
        calls = calls_of(queries, keys, values, mask, cache)
        shared = [i for i, call in enumerate(calls) if call.separate and named.get("sinks") is None]
        found = attend_separately([calls[i] for i in shared], named["scale"])
        joint = dict(zip(shared, found, strict=True))
        out = [joint[i] if i in joint else alone(call.whole, named) for i, call in enumerate(calls)]
        if not isinstance(keys, Parts):
            return out[0]
        runs = zip(out, keys.runs, strict=True)
        return mx.concatenate([x.swapaxes(0, 2) if run.turned else x for x, run in runs])

    def alone(call: Call, named: dict[str, Any]) -> mx.array:
        queries, keys, values, mask, cache = call
        if isinstance(keys, tuple) and not hasattr(cache, "bits"):
            cache = Quantised.of(keys, queries.shape[-1])
        if isinstance(keys, tuple) and _needs_copies(queries):
            if keys[0].shape[2] > MOST_COPIED_LENGTH:
                mx.eval(queries)  # frees the copies of the previous layer first
            keys, values = dequantise(keys, cache), dequantise(values, cache)
            cache = None
        return original(queries, keys, values, cache, **named, mask=mask)  # type: ignore[no-any-return]

    return attend


class Quantised(NamedTuple):
    """The properties that attention reads from a quantised cache. A layer that uses the keys of
    another layer has no cache; upstream would treat such keys as unquantised
    (mlx_lm/models/base.py 0.32.2)."""

    group_size: int
    bits: int

    @classmethod
    def of(cls, keys: tuple[mx.array, mx.array, mx.array], width: int) -> Quantised:
        """`width`: numbers in one key, D."""
        packed, scales, _ = keys
        return cls(width // scales.shape[-1], 32 * packed.shape[-1] // width)


def _needs_copies(queries: mx.array) -> bool:
    """Whether these queries use dequantised copies: they are many and a fused kernel exists for
    their head size, or the GPU has no product with quantised keys."""
    *_, count, width = queries.shape
    wide = count > MOST_QUANTISED_QUERIES and width in FUSED_WIDTHS
    return mx.default_device() == mx.gpu and (wide or not multiplies_quantised())


Watch = Callable[[mx.array, mx.array, Any, float], None]
"""Arguments: queries (B, H, L, D), keys (B, Hk, S, D) in the cache's format, cache, scale."""


@contextmanager
def watch_attention(model: Any, watch: Watch) -> Iterator[None]:
    """Inside the block, each call of a model's attention first calls `watch`. Models of one
    architecture share the patched modules, so no other may run meanwhile: engine thread only."""

    def watching(function: Function) -> Function:
        @functools.wraps(function)
        def attend(
            queries: mx.array, keys: Any, values: Any, cache: Any = None, *args: Any, **kwargs: Any
        ) -> mx.array:
            named = dict(zip(PARAMETERS, args, strict=False)) | kwargs
            watch(queries, keys, cache, named["scale"])
            return function(queries, keys, values, cache, *args, **kwargs)  # type: ignore[no-any-return]

        return attend

    modules = namespaces(model)
    patch(modules, NAME, watching)
    try:
        yield
    finally:
        unpatch(modules, watching)
