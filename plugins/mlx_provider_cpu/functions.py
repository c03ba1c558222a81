"""The functions of upstream's models that NumPy replaces. Named by the module that defines them
(mlx 0.32.4, mlx-lm 0.32.2, mlx-vlm 0.7.10). Small arrays, and those not float32, go to the
original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_provider import Replacement
from mlx_provider.records import Function, Parts, parts_of

from . import activations, attention, gated_delta

PARAMETERS = ("scale", "mask", "sinks")
"""Of upstream's `scaled_dot_product_attention`, after the cache."""


def _elementwise(ours: Function) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        def call(*arrays: mx.array) -> Any:
            first = arrays[0]
            if first.size < activations.WORTH or any(
                a.dtype != mx.float32 or a.shape != first.shape for a in arrays
            ):
                return original(*arrays)
            return ours(*arrays)

        return call

    return make


def _precise_swiglu(hidden: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Upstream takes its result's dtype from `hidden`; here all are float32."""
    return activations.swiglu(gate, x)


def _attention(original: Function) -> Function:
    """Attends several caches per call, because each alone may be too small."""

    def call(
        queries: mx.array, keys: Any, values: Any, cache: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        named = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        parts = parts_of(keys, values, named.pop("mask", None))
        if isinstance(keys, Parts) and keys.apart:
            each = zip(parts, keys.runs, strict=True)
            return mx.concatenate(
                [call(p.of(queries), *p[:2], run.cache, **named, mask=p.mask) for p, run in each]
            )
        if attention.applies(queries, parts, named):
            return attention.attend(queries, parts, **named)
        return original(queries, keys, values, cache, *args, **kwargs)

    return call


def _vision_attention(original: Function) -> Function:
    def call(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None = None,
    ) -> Any:
        parts = parts_of(keys, values, mask)
        if attention.applies(queries, parts, {"scale": scale}):
            return attention.attend(queries, parts, scale=scale)
        return original(queries, keys, values, scale, mask)

    return call


def _delta_chunks(original: Function) -> Function:
    def call(
        q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, mask: Any = None, **more: Any
    ) -> Any:
        arrays = (q, k, v, g, beta, state)
        if mask is None and _float32(arrays):
            return gated_delta.gated_delta(*arrays)
        return original(*arrays, mask, **more)

    return call


def _delta_step(original: Function) -> Function:
    def call(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, mask: Any = None) -> Any:
        arrays = (q, k, v, g, beta, state)
        one = mask is None and state is not None and q.shape[1] == 1 and g.ndim == 3
        if one and state.size >= gated_delta.WORTH and _float32(arrays):
            return gated_delta.gated_delta_step(*arrays)
        return original(*arrays, mask)

    return call


def _float32(arrays: Sequence[mx.array]) -> bool:
    return all(array.dtype == mx.float32 for array in arrays)


_delta = partial(Replacement, "mlx_vlm.models.qwen3_5.gated_delta", at_home=True)

REPLACEMENTS = (
    Replacement("mlx.nn.layers.activations", "gelu_approx", _elementwise(activations.gelu_tanh)),
    Replacement("mlx_lm.models.activations", "precise_swiglu", _elementwise(_precise_swiglu)),
    Replacement("mlx_lm.models.activations", "swiglu", _elementwise(activations.swiglu)),
    Replacement("mlx_lm.models.base", "scaled_dot_product_attention", _attention),
    Replacement("mlx_vlm.models.activations", "swiglu", _elementwise(activations.swiglu)),
    Replacement("mlx_vlm.models.base", "ensure_fused_sdpa", _vision_attention),
    Replacement("mlx_vlm.models.base", "scaled_dot_product_attention", _attention),
    Replacement(
        "mlx_vlm.models.qwen3_5.language", "_precise_swiglu", _elementwise(_precise_swiglu)
    ),
    _delta(name="gated_delta_chunked", make=_delta_chunks),
    _delta(name="gated_delta_ops", make=_delta_step),
)
