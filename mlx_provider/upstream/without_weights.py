"""Models of mlx-lm and mlx-vlm as a `config.json` describes them, before there are weights.

MLX computes nothing until it is asked to, and nobody asks here: a model of 130 GB is described in a
tenth of a second and a few MB. Holds for mlx-lm 0.32.2 and mlx-vlm 0.7.10 (`load_model` in their
`utils.py`, of which these are the steps that need no file).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedModel
from ..isolation import Isolation
from . import mlx_lm, mlx_vlm

PARTS = ["text", "vision", "perceiver", "projector", "audio"]
HEAD = "lm_head"
GROUP = 64
"""Values that share a scale where the config does not tell (both libraries' default)."""


def described(
    config: Mapping[str, Any], *, dtype: str = "bfloat16", stored: Collection[str] = ()
) -> Any:
    """The model of a config, in `dtype`, quantised as the config says; no array is computed.

    mlx-vlm's class where the config has a vision tower, else mlx-lm's. `stored`: names of the
    tensors in its files, by which modules have few bits, and a head of their own; empty: every
    module has few bits that can, apart from towers, and a head that the class has is its own.
    Raises `UnsupportedModel` for what neither library can make of it.
    """
    own = copy.deepcopy(dict(config))
    scaled = {name.removesuffix(".scales") for name in stored if name.endswith(".scales")}
    with Isolation() as trying:
        model = _vision(own) if own.get("vision_config") else _text(own)
        model.set_dtype(getattr(mx, dtype))
        _quantise(model, own.get("quantization") or {}, scaled)
        if stored and not any(HEAD in name.split(".") for name in stored):
            _drop_head(model)
        return model
    told = trying.fault.told if trying.fault else ""
    raise UnsupportedModel(f"no model of type {own.get('model_type')!r} can be described: {told}")


def _text(config: dict[str, Any]) -> Any:
    model_class, arguments = mlx_lm.classes(config)
    return model_class(arguments.from_dict(config))


def _vision(config: dict[str, Any]) -> Any:
    library = mlx_vlm.library()
    module, _ = library.get_model_and_args(config=config)
    config = {"text_config": {}, "audio_config": {}} | config
    arguments = module.ModelConfig.from_dict(config)
    return module.Model(library.update_module_configs(arguments, module, config, PARTS))


def _quantise(model: Any, told: Mapping[str, Any], scaled: Collection[str]) -> None:
    if "bits" not in told:
        return
    group = told.get("group_size", GROUP)

    def takes(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        if path in told:
            return told[path]
        return path in scaled if scaled else _would_be(path, module, group)

    mode = told.get("mode", "affine")
    nn.quantize(model, group_size=group, bits=told["bits"], mode=mode, class_predicate=takes)


def _drop_head(model: Any) -> None:
    """Of a class that has one always, and shares the embedding where the files have none."""
    for _, module in model.named_modules():
        if HEAD in module:
            del module[HEAD]


def _would_be(path: str, module: Any, group: int) -> bool:
    """Whether the libraries' converters put a module into few bits."""
    whole = module.weight.shape[-1] % group == 0
    return whole and not mlx_vlm.library().skip_multimodal_module(path)
