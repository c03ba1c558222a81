"""The quantised products of a model's layers, with all tokens of a call as one matrix.

`quantized_matmul` of CUDA (mlx 0.32.4, backend/cuda/quantized/qmm: M is `out.shape(-2)`) runs an
input (N, 1, d) as N products of one row. Milliseconds of the products of all 36 layers of an 8B
model in 4 bit on an H100: (16, 1, d) 49, (1, 16, d) 5.0, (1, 7, d) 28, (1, 8, d) 5.7,
(1, 512, d) 59, and 28 with dequantised weights.
"""

from typing import Any

import mlx.core as mx

from mlx_provider import Replacement
from mlx_provider.records import Function

TILE = 8
"""Fewer rows, but more than one, take longer than so many."""
DEQUANTISE = 192
"""From this many tokens, the product of dequantised weights is faster, although they are made for
each call."""
HOME = "mlx.nn.layers.quantized"


def _as_one_matrix(original: Function) -> Function:
    """For a method of a quantised layer that multiplies by the transposed weights."""

    def call(layer: Any, x: mx.array) -> Any:
        *leading, size = x.shape
        tokens = x.size // size
        if tokens == 1:
            return original(layer, x)
        x = x.reshape(1, tokens, size)
        if tokens >= DEQUANTISE:
            out = _dequantise(layer, x)
        elif tokens < TILE:
            out = original(layer, mx.pad(x, [(0, 0), (0, TILE - tokens), (0, 0)]))[:, :tokens]
        else:
            out = original(layer, x)
        return out.reshape(*leading, out.shape[-1])

    return call


def _dequantise(layer: Any, x: mx.array) -> mx.array:
    weights = mx.dequantize(
        layer["weight"],
        scales=layer["scales"],
        biases=layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
    out = x @ weights.astype(x.dtype).T
    return out + layer["bias"] if "bias" in layer else out


REPLACEMENTS = (
    Replacement(HOME, "QuantizedEmbedding.as_linear", _as_one_matrix, at_home=True),
    Replacement(HOME, "QuantizedLinear.__call__", _as_one_matrix, at_home=True),
)
