"""Loads and checks the weights of a head, quantised as stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_provider import BadRequest
from mlx_provider.families.attention import route
from mlx_provider.families.expand import expand

from .checkpoint import Tensors

MODES = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
"""Modes of quantised weights without biases, by bits and group size (mlx 0.32.4)."""


def load_into(module: nn.Module, tensors: Tensors, language: Any) -> None:
    """Quantised parts stay quantised, unless the model is dequantised to float32. Raises
    `BadRequest` if the tensors do not fit."""
    _quantise_like(module, tensors)
    _check(module, tensors)
    module.load_weights(list(tensors.items()))
    if language.model.norm.weight.dtype == mx.float32 and not _quantised(language):
        expand(module, "float32")
    module.eval()
    mx.eval(module.parameters())
    route(module)


def _quantise_like(module: nn.Module, tensors: Tensors) -> None:
    """Quantise like the stored tensors, by their shapes: the config sometimes lacks a head that was
    added later."""
    nn.quantize(module, class_predicate=partial(_form, tensors))


def _form(tensors: Tensors, name: str, layer: Any) -> dict[str, Any] | bool:
    weight, scales = tensors.get(f"{name}.weight"), tensors.get(f"{name}.scales")
    if weight is None or scales is None or not hasattr(layer, "to_quantized"):
        return False
    inputs = layer.weight.shape[-1]
    bits, group = 32 * weight.shape[-1] // inputs, inputs // scales.shape[-1]
    affine = f"{name}.biases" in tensors
    mode = "affine" if affine else MODES.get((bits, group), "affine")
    return {"group_size": group, "bits": bits, "mode": mode}


def _quantised(language: Any) -> bool:
    return any(name.endswith(".scales") for name, _ in tree_flatten(language.parameters()))


def _check(module: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    """Raises `BadRequest` for a tensor that is missing, unknown or of another shape."""
    wanted = {name: value.shape for name, value in tree_flatten(module.parameters())}
    for name in sorted(wanted.keys() | tensors.keys()):
        have = tensors[name].shape if name in tensors else None
        if have != wanted.get(name):
            summary = (
                f"mtp.{name} is {have or 'missing'}, and should be {wanted.get(name) or 'absent'}"
            )
            raise BadRequest(f"the MTP head does not fit its model: {summary}", param="drafter")
