"""The products and the attention of a model's layers, reshaped so that CUDA computes them fast.

Products: `quantized_matmul` of CUDA (mlx 0.32.4, backend/cuda/quantized/qmm: M is `out.shape(-2)`)
runs an input (N, 1, d) as N products of one row. Milliseconds of the products of all 36 layers of
an 8B model in 4 bit on an H100: (16, 1, d) 49, (1, 16, d) 5.0, (1, 7, d) 28, (1, 8, d) 5.7,
(1, 512, d) 59, and 28 with dequantised weights. Products of experts, by the source and not timed:
`gather_qmm` makes each row a product of its own, sorted or not (quantized.cpp); `gather_mm` makes
one matrix of the sorted rows of each expert (matmul.cpp).

Attention of prompts: on any card, cuDNN makes a plan for each new shape and layout of queries and
keys (40 to 75 ms on an H100; mlx 0.32.4, scaled_dot_product_attention.cpp, `SDPACacheKey`)."""

from typing import Any

import mlx.core as mx

from mlx_provider import Replacement
from mlx_provider.records import Function

TILE = 8  # 2 to 7 rows take longer than 8, so they are padded
DEQUANTISE = 192  # from so many tokens, it is faster to dequantise the weights for each call
GRID = 256
"""Queries are padded if the number of keys before them is a multiple of this. Else, nearly every
number of keys is new anyway."""
PARAMETERS = ("scale", "mask", "sinks")
"""The parameters of upstream's `scaled_dot_product_attention` after `cache`."""


def _as_one_matrix(original: Function) -> Function:
    """For a method of a quantised layer that multiplies rows (..., size) by its weights."""

    def call(layer: Any, x: mx.array) -> Any:
        *leading, size = x.shape
        tokens = x.size // size
        if tokens == 1:
            return original(layer, x)
        x = x.reshape(1, tokens, size)
        if tokens >= DEQUANTISE:
            out = x @ _weights(layer, x.dtype)
            out = out + layer["bias"] if "bias" in layer else out
        elif tokens < TILE:
            out = original(layer, mx.pad(x, [(0, 0), (0, TILE - tokens), (0, 0)]))[:, :tokens]
        else:
            out = original(layer, x)
        return out.reshape(*leading, out.shape[-1])

    return call


def _as_matrices_of_heads(original: Function) -> Function:
    """For latent attention: a method that multiplies (rows, heads, tokens, size) by the weights of
    each head."""

    def call(layer: Any, x: mx.array, transpose: bool = True) -> Any:
        rows, heads, tokens, size = x.shape
        if rows == 1:
            return original(layer, x, transpose)
        padding = max(0, TILE - rows * tokens)
        x = x.swapaxes(0, 1).reshape(1, heads, rows * tokens, size)
        # pads by 0, too, because that copies the rows into their order
        x = mx.pad(x, [(0, 0), (0, 0), (0, padding), (0, 0)])
        out = original(layer, x, transpose)
        out = out[:, :, : rows * tokens].reshape(heads, rows, tokens, out.shape[-1])
        return out.swapaxes(0, 1)

    return call


def _as_matrices_of_experts(original: Function) -> Function:
    """For a product with experts: dequantises their weights if each has `TILE` rows or more on
    average: one by one, products of so many rows would take as long as that."""

    def call(layer: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        few = not sorted_indices or indices.size < TILE * layer.num_experts
        if few or layer.get("global_scale") is not None:
            return original(layer, x, indices, sorted_indices=sorted_indices)
        weights = _weights(layer, x.dtype)
        out = mx.gather_mm(x, weights, rhs_indices=indices, sorted_indices=True)
        return out + layer["bias"][indices][:, None] if "bias" in layer else out

    return call


def _weights(layer: Any, dtype: mx.Dtype) -> mx.array:
    """The weights of a quantised layer, dequantised and transposed."""
    packed = layer["weight"], layer["scales"], layer.get("biases")
    found = mx.dequantize(*packed, layer.group_size, layer.bits, layer.mode)
    return found.astype(dtype).swapaxes(-1, -2)


def _in_few_shapes(original: Function) -> Function:
    """Pads queries, keys and values at their end, so that the number of queries is a power of two.
    A causal mask hides the padding from every query whose result is used."""

    def call(
        queries: mx.array, keys: Any, values: Any, cache: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if (count := queries.shape[-2]) <= TILE:
            return original(queries, keys, values, cache, *args, **kwargs)
        named = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        mask = named.get("mask")
        padding = (1 << (count - 1).bit_length()) - count
        causal = isinstance(mask, str) and mask == "causal" and isinstance(keys, mx.array)
        if not causal or not padding or (keys.shape[-2] - count) % GRID:
            return original(queries, keys, values, cache, **named)
        width = [(0, 0), (0, 0), (0, padding), (0, 0)]
        padded = (mx.pad(array, width) for array in (queries, keys, values))
        return original(*padded, cache, **named)[..., :count, :]

    return call


LAYERS, EXPERTS = "mlx.nn.layers.quantized", "QuantizedSwitchLinear.__call__"
HEADS = "QuantizedMultiLinear.__call__"
ATTENTION = "scaled_dot_product_attention"
REPLACEMENTS = (
    Replacement(LAYERS, "QuantizedEmbedding.as_linear", _as_one_matrix, in_module=True),
    Replacement(LAYERS, "QuantizedLinear.__call__", _as_one_matrix, in_module=True),
    Replacement("mlx_lm.models.mla", HEADS, _as_matrices_of_heads, in_module=True),
    Replacement("mlx_vlm.models.mla", HEADS, _as_matrices_of_heads, in_module=True),
    Replacement("mlx_lm.models.switch_layers", EXPERTS, _as_matrices_of_experts, in_module=True),
    Replacement("mlx_lm.models.base", ATTENTION, _in_few_shapes),
    Replacement("mlx_vlm.models.base", ATTENTION, _in_few_shapes),
    Replacement("mlx_vlm.models.switch_layers", EXPERTS, _as_matrices_of_experts, in_module=True),
)
