"""Changes to layers of upstream's models: attention over several caches, patches, other dtypes.

Call `route_attention(model)` once after loading: without it, rows decode merged or one by one. It
replaces the `scaled_dot_product_attention` in the modules of the model's layers. Layers of a
family's own must import that function from `mlx_lm.models.base`, and call it. Inside the block
`watch_attention(model, watch)`, each call first calls `watch(queries, keys, cache, scale)`.
`patch(owners, name, make)` replaces a function of modules or classes by `make(original)`, once."""

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
"""Classes of mlx, mlx-lm 0.32.2, mlx-vlm 0.7.10. The plain class has no `Quantized` in its name."""
PARTS = {"weight", "scales", "biases", "bias"}
"""Arrays of a layer. One that has others, such as a `global_scale`, stays quantised."""


def expand(model: Any, dtype: str) -> None:
    """Dequantise quantised layers and cast floating weights to `dtype`, because MLX's CPU kernels
    for 16-bit and quantised weights are many times slower than those for float32 (mlx 0.32.4;
    prefill of 3,800 tokens in bf16: 17 times). Changes `model`; evaluates nothing. Weights that a
    model keeps in a wider dtype (mlx-lm's `cast_predicate`) are not narrowed. `dequantize_model` of
    mlx-lm skips mlx-vlm's layers, drops a `global_scale`, and rounds to the dtype of the scales."""
    target = getattr(mx, dtype)
    plain = [
        (name, _dequantise(layer, plain_class, target))
        for name, layer in model.named_modules()
        if (plain_class := _plain_class(layer))
    ]
    model.update_modules(tree_unflatten(plain))
    may_cast = getattr(model, "cast_predicate", None)
    cast: dict[int, tuple[mx.array, mx.array]] = {}  # a tied matrix stays one array

    def cast_weight(name: str, value: mx.array) -> mx.array:
        narrows = value.dtype.size > target.size
        stays_wide = narrows and may_cast and not may_cast(name)
        if stays_wide or not mx.issubdtype(value.dtype, mx.floating):
            return value
        return cast.setdefault(id(value), (value, value.astype(target)))[1]

    model.update(tree_map_with_path(cast_weight, model.parameters()))


def _plain_class(layer: nn.Module) -> type[nn.Module] | None:
    """`None`: the layer is not quantised, or has other arrays."""
    layer_class = type(layer)
    name, module = layer_class.__name__, layer_class.__module__
    if name not in QUANTISED or "scales" not in layer or layer.keys() - PARTS:
        return None
    namespace = nn if module.startswith(nn.__name__) else sys.modules[module]
    plain: type[nn.Module] | None = getattr(namespace, name.removeprefix("Quantized"), None)
    return plain


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
    """Floating scales or biases in `target`, or in their own wider dtype."""
    if factors is None or not mx.issubdtype(factors.dtype, mx.floating):
        return factors
    return factors if factors.dtype.size > target.size else factors.astype(target)
