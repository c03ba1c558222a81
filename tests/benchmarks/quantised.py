"""Tiny models in four bits."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from tiny import family_named

GROUP = 32
"""Values that share a scale."""
FILE = "model.safetensors"


def quantise(folder: Path, family: str, *, group: int = GROUP, dtype: str | None = None) -> Path:
    """A folder of `build` as mlx-lm's and mlx-vlm's converters leave it, in four bits.

    `dtype`: that of scales and of what is not quantised; unset: the checkpoint's. Layers whose
    rows are no multiple of `group` stay as they are.
    """
    import mlx_lm.utils
    import mlx_vlm.utils

    def takes(name: str, layer: Any) -> bool:
        return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % group == 0

    vision = family_named(family).library == "mlx_vlm"
    model = mlx_vlm.utils.load_model(folder) if vision else mlx_lm.utils.load_model(folder)[0]
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
    nn.quantize(model, class_predicate=takes, group_size=group, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.eval(weights)
    mx.save_safetensors(str(folder / FILE), weights, metadata={"format": "mlx"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization": {"group_size": group, "bits": 4}}
    path.write_text(json.dumps(config))
    return folder
