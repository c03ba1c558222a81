"""The functions of upstream's models that NumPy replaces (mlx 0.32.4, mlx-lm 0.32.2, mlx-vlm
0.7.10): `REPLACEMENTS` lists them by the module that defines them. Small arrays, and those not
float32, go to the original. Activations are evaluated at once, by the formulas of `mlx.nn`."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_provider import Replacement
from mlx_provider.records import Function, Parts, parts_of

from . import attention

WORTH = 1 << 13  # with fewer elements, synchronisation costs more than it saves


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """`silu(gate) * x`; two arrays of one shape, float32."""
    out = _silu(gate)
    mx.eval(x)
    out *= np.asarray(x)
    return mx.array(out)


def gelu_tanh(x: mx.array) -> mx.array:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))`; any shape, float32."""
    mx.eval(x)
    own = np.asarray(x)
    out = own * own
    out *= np.float32(0.044715)
    out += np.float32(1)
    out *= own
    out *= np.float32(math.sqrt(2 / math.pi))
    np.tanh(out, out=out)
    out += np.float32(1)
    out *= own
    out *= np.float32(0.5)
    return mx.array(out)


def _silu(x: mx.array) -> NDArray[np.float32]:
    mx.eval(x)
    own = np.asarray(x)
    out: NDArray[np.float32] = np.negative(own)
    with np.errstate(over="ignore"):  # far below zero the quotient is zero, as it should be
        np.exp(out, out=out)
    out += np.float32(1)
    np.divide(own, out, out=out)
    return out


PARAMETERS = ("scale", "mask", "sinks")
"""The parameters of upstream's `scaled_dot_product_attention` after `cache`."""


def _elementwise(ours: Function) -> Callable[[Function], Function]:
    """For a function of arrays of one shape: call `ours` where that is correct and faster."""

    def make(original: Function) -> Function:
        def call(*arrays: mx.array) -> Any:
            shape = arrays[0].shape
            fits = (array.dtype == mx.float32 and array.shape == shape for array in arrays)
            return ours(*arrays) if arrays[0].size >= WORTH and all(fits) else original(*arrays)

        return call

    return make


def _attention(original: Function) -> Function:
    """Attends to several caches (`Parts`) in one call, because each alone may be too small."""

    def call(
        queries: mx.array, keys: Any, values: Any, cache: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        named = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        parts = parts_of(keys, values, named.pop("mask", None))
        if isinstance(keys, Parts) and keys.isolated:
            outputs = [
                call(part.select(queries), *part[:2], run.cache, **named, mask=part.mask)
                for part, run in zip(parts, keys.runs, strict=True)
            ]
            return mx.concatenate(outputs)
        if attention.applies(queries, parts, named):
            return attention.attend(queries, parts, **named)
        return original(queries, keys, values, cache, *args, **kwargs)

    return call


def _vision_attention(original: Function) -> Function:
    def call(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any = None
    ) -> Any:
        parts = parts_of(keys, values, mask)
        if attention.applies(queries, parts, {"scale": scale}):
            return attention.attend(queries, parts, scale=scale)
        return original(queries, keys, values, scale, mask)

    return call


# upstream takes its result's dtype from `hidden`; here all are float32
PRECISE = _elementwise(lambda hidden, gate, x: swiglu(gate, x))
REPLACEMENTS = (
    Replacement("mlx.nn.layers.activations", "gelu_approx", _elementwise(gelu_tanh)),
    Replacement("mlx_lm.models.activations", "precise_swiglu", PRECISE),
    Replacement("mlx_lm.models.activations", "swiglu", _elementwise(swiglu)),
    Replacement("mlx_lm.models.base", "scaled_dot_product_attention", _attention),
    Replacement("mlx_vlm.models.activations", "swiglu", _elementwise(swiglu)),
    Replacement("mlx_vlm.models.base", "ensure_fused_sdpa", _vision_attention),
    Replacement("mlx_vlm.models.base", "scaled_dot_product_attention", _attention),
    Replacement("mlx_vlm.models.qwen3_5.language", "_precise_swiglu", PRECISE),
)
