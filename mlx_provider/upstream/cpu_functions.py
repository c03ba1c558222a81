"""Which functions of upstream's models are ours on a CPU: the table, and putting them in.

By the module and name of their definition (mlx 0.32.4, mlx-lm 0.32.2, mlx-vlm 0.7.10), since others
of the same name do something else. What is not worth it goes to the original: small arrays, and
for NumPy those not float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from . import attention, cpu_activations, cpu_attention, cpu_device
from .stand_in import Function, namespaces, stand_in


def adopt(model: Any) -> None:
    """Let ours stand in for what `model`'s modules call. Idempotent; does nothing elsewhere."""
    if not cpu_device.in_use():
        return
    for name in sorted({name for _, name in OURS}):
        stand_in(namespaces(model), name, _ours)


def _ours(original: Function) -> Function | None:
    defined = getattr(original, "__module__", ""), getattr(original, "__name__", "")
    make = OURS.get(defined)
    return None if make is None else functools.wraps(original)(make(original))


def _elementwise(ours: Function) -> Callable[[Function], Function]:
    """For a function of arrays of one shape."""

    def make(original: Function) -> Function:
        def call(*arrays: mx.array) -> Any:
            first = arrays[0]
            if first.size < cpu_activations.WORTH or any(
                a.dtype != mx.float32 or a.shape != first.shape for a in arrays
            ):
                return original(*arrays)
            return ours(*arrays)

        return call

    return make


def _precise_swiglu(hidden: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Upstream takes its result's dtype from `hidden`; here all are float32."""
    return cpu_activations.swiglu(gate, x)


def _vision_attention(original: Function) -> Function:
    def call(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None = None,
    ) -> Any:
        parts = [cpu_attention.Part(keys, values, mask)]
        if cpu_attention.applies(queries, parts, {"scale": scale}):
            return cpu_attention.attend(queries, parts, scale=scale)
        return original(queries, keys, values, scale, mask)

    return call


def _left_padded(original: Function) -> Function:
    """Rows of several lengths in one call; upstream's, without Metal, takes row after row."""

    def call(
        queries: mx.array, keys: Any, values: Any, *, cache: Any, scale: float, mask: Any
    ) -> Any:
        pads = getattr(cache, "_qwen3_5_decode_left_padding", None)
        if pads is None or queries.shape[2] > 1 or not isinstance(keys, mx.array):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask)
        first = mx.array(pads, dtype=mx.int32)[:, None, None, None]
        attend = original.__globals__[attention.NAME]
        seen = mx.arange(keys.shape[2]) >= first
        return attend(queries, keys, values, cache=None, scale=scale, mask=seen)

    return call


OURS: Mapping[tuple[str, str], Callable[[Function], Function]] = {
    ("mlx.nn.layers.activations", "gelu_approx"): _elementwise(cpu_activations.gelu_tanh),
    ("mlx_lm.models.activations", "precise_swiglu"): _elementwise(_precise_swiglu),
    ("mlx_lm.models.activations", "swiglu"): _elementwise(cpu_activations.swiglu),
    ("mlx_vlm.models.activations", "swiglu"): _elementwise(cpu_activations.swiglu),
    ("mlx_vlm.models.base", "ensure_fused_sdpa"): _vision_attention,
    ("mlx_vlm.models.qwen3_5.language", "_precise_swiglu"): _elementwise(_precise_swiglu),
    ("mlx_vlm.models.qwen3_5.language", "_qwen3_5_left_padded_attention"): _left_padded,
}
