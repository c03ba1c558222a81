"""Changes to layers of upstream's models, for families: attention over several caches, patches of
functions, weights in another dtype.

Without `route_attention`, once after loading, the rows of a model decode merged, or one by one. A
model's own layers must call a `scaled_dot_product_attention` that their module imports from
`mlx_lm.models.base`."""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten

from ..upstream.attention import route as route_attention
from ..upstream.attention import watch_attention
from ..upstream.patching import patch

__all__ = ["expand", "patch", "route_attention", "watch_attention"]

QUANTISED = "QuantizedLinear QuantizedEmbedding QuantizedSwitchLinear QuantizedMultiLinear".split()
"""Of mlx, mlx-lm 0.32.2 and mlx-vlm 0.7.10. The plain form of each has no prefix."""
PARTS = {"weight", "scales", "biases", "bias"}
"""Layers with other arrays, such as a `global_scale`, stay quantised."""


def expand(model: Any, dtype: str) -> None:
    """Dequantise quantised layers and cast floating weights to `dtype`, because MLX's CPU kernels
    for 16-bit and quantised weights are many times slower than those for float32 (mlx 0.32.4;
    prefill of 3,800 tokens in bf16: 17 times). Evaluates nothing.

    Weights that a model keeps in a wider dtype (mlx-lm's `cast_predicate`) are not narrowed.
    mlx-lm's `dequantize_model` skips mlx-vlm's layers, drops a `global_scale`, and rounds to the
    dtype of the scales."""
    target = getattr(mx, dtype)
    plain = [
        (name, _dequantise(layer, plain_class, target))
        for name, layer in model.named_modules()
        if (plain_class := _plain_class(layer))
    ]
    model.update_modules(tree_unflatten(plain))
    keeps = getattr(model, "cast_predicate", None)
    cast: dict[int, tuple[mx.array, mx.array]] = {}  # a tied matrix stays one array

    def cast_weight(name: str, value: mx.array) -> mx.array:
        narrows = value.dtype.size > target.size
        if not mx.issubdtype(value.dtype, mx.floating) or (narrows and keeps and not keeps(name)):
            return value
        return cast.setdefault(id(value), (value, value.astype(target)))[1]

    model.update(tree_map_with_path(cast_weight, model.parameters()))


def _plain_class(layer: nn.Module) -> type[nn.Module] | None:
    layer_class = type(layer)
    name, module = layer_class.__name__, layer_class.__module__
    if name not in QUANTISED or "scales" not in layer or layer.keys() - PARTS:
        return None
    namespace = nn if module.startswith(nn.__name__) else sys.modules[module]
    found: type[nn.Module] | None = getattr(namespace, name.removeprefix("Quantized"), None)
    return found


def _dequantise(layer: Any, plain_class: type[nn.Module], target: mx.Dtype) -> nn.Module:
    plain: Any = nn.Module.__new__(plain_class)
    nn.Module.__init__(plain)  # the constructor of the class would draw random weights
    scales: Any = _widen(layer.scales, target)
    biases = _widen(layer.get("biases"), target)
    plain.weight = mx.dequantize(
        layer.weight, scales, biases, layer.group_size, layer.bits, layer.mode
    )
    if "bias" in layer:
        plain.bias = layer.bias
    return plain


def _widen(factors: mx.array | None, target: mx.Dtype) -> mx.array | None:
    """Scales or biases, so that the product is not rounded to a dtype narrower than `target`."""
    if factors is None or not mx.issubdtype(factors.dtype, mx.floating):
        return factors
    return factors if factors.dtype.size > target.size else factors.astype(target)
