"""Changes layers of upstream's models: their attention, their functions, the dtype of weights.

`route_attention(model)`, once after loading, makes the attention of mlx-lm's and mlx-vlm's models
understand groups of rows; without it rows decode merged, or one by one. A model's own layers must
call a `scaled_dot_product_attention` that stands at the top of their module, imported from
`mlx_lm.models.base`. Inside `with watch_attention(model, watch)`, `watch` gets what each layer's
attention compares.

`patch(modules, name, make)`: `make(original)` replaces `name` in the modules. All models of an
architecture share them, so the result must be correct for each.

`expand(model, dtype)`: MLX's CPU kernels for 16-bit and quantised weights are many times slower
than those for float32 (mlx 0.32.4; prefill of 3,800 tokens in bf16: 17 times).
"""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten

from ..upstream.attention import route as route_attention
from ..upstream.attention import watch_attention
from ..upstream.patching import patch

__all__ = ["QUANTISED", "expand", "patch", "route_attention", "watch_attention"]

QUANTISED = (
    "QuantizedLinear",
    "QuantizedEmbedding",
    "QuantizedSwitchLinear",
    "QuantizedMultiLinear",
)
"""Layers of mlx, mlx-lm 0.32.2 and mlx-vlm 0.7.10 with their plain forms. Layers with a
`global_scale`, or parts other than weight and bias, stay quantised."""


def expand(model: Any, dtype: str) -> None:
    """Dequantise quantised layers and cast floating weights to `dtype`. Evaluates nothing.

    Weights that a model keeps in a wider dtype (mlx-lm's `cast_predicate`) are not narrowed.
    mlx-lm's `dequantize_model` skips mlx-vlm's layers, drops a `global_scale`, and rounds to the
    dtype of the scales.
    """
    kind = getattr(mx, dtype)
    plain = [
        (name, _dequantise(layer, form, kind))
        for name, layer in model.named_modules()
        if (form := _plain_form(layer))
    ]
    model.update_modules(tree_unflatten(plain))
    keeps = getattr(model, "cast_predicate", None)
    cast: dict[int, tuple[mx.array, mx.array]] = {}  # a tied matrix stays one array

    def cast_weight(name: str, value: mx.array) -> mx.array:
        narrows = value.dtype.size > kind.size
        if not mx.issubdtype(value.dtype, mx.floating) or (narrows and keeps and not keeps(name)):
            return value
        return cast.setdefault(id(value), (value, value.astype(kind)))[1]

    model.update(tree_map_with_path(cast_weight, model.parameters()))


def _plain_form(layer: nn.Module) -> type[nn.Module] | None:
    kind = type(layer)
    scaled_again = layer.get("global_scale") is not None
    if kind.__name__ not in QUANTISED or "scales" not in layer or scaled_again:
        return None
    own = nn if kind.__module__.startswith(nn.__name__) else sys.modules[kind.__module__]
    found: type[nn.Module] | None = getattr(own, kind.__name__.removeprefix("Quantized"), None)
    return found


def _dequantise(layer: Any, kind: type[nn.Module], dtype: mx.Dtype) -> nn.Module:
    plain: Any = nn.Module.__new__(kind)
    nn.Module.__init__(plain)  # the constructor of the class would draw random weights
    scales: Any = _wide(layer.scales, dtype)
    biases = _wide(layer.get("biases"), dtype)
    plain.weight = mx.dequantize(
        layer.weight, scales, biases, layer.group_size, layer.bits, layer.mode
    )
    if "bias" in layer:
        plain.bias = layer.bias
    return plain


def _wide(factors: mx.array | None, dtype: mx.Dtype) -> mx.array | None:
    """Scales or biases in a dtype in which the product is not rounded to a narrower one."""
    if factors is None or not mx.issubdtype(factors.dtype, mx.floating):
        return factors
    return factors.astype(dtype)
