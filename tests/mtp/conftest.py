"""Tiny models with a head, built once."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import mlx_vlm.utils
import pytest
from mlx.utils import tree_flatten

from equipped import equipped, load_by_family
from mlx_provider import LoadedModel
from mlx_provider.families.checkpoint import read_json
from tiny import build, family_named

GROUP = 32


@dataclass(frozen=True)
class Tiny:
    """A checkpoint and its model in memory."""

    folder: Path
    model: Any


def load(folder: Path, **options: Any) -> LoadedModel:
    return equipped(load_by_family(folder, **options))


def quantise(folder: Path, vision: bool) -> None:
    """In four bits, the head, too; its `fc` in eight, which the config says."""
    with_head = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    model = mlx_vlm.utils.load_model(folder) if vision else _text_model(folder)
    nn.quantize(model, group_size=GROUP, bits=4, class_predicate=_takes)
    weights = dict(tree_flatten(model.parameters()))
    quantisation: dict[str, Any] = {"group_size": GROUP, "bits": 4}
    for name, value in with_head.items():
        if not name.startswith("mtp."):
            continue
        weights[name] = value
        if value.ndim > 1:
            bits = 8 if name == "mtp.fc.weight" else 4
            names = [name, name.replace(".weight", ".scales"), name.replace(".weight", ".biases")]
            weights |= dict(zip(names, mx.quantize(value, GROUP, bits), strict=True))
    quantisation["mtp.fc"] = {"group_size": GROUP, "bits": 8}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = read_json(folder / "config.json") | {"quantization": quantisation}
    (folder / "config.json").write_text(json.dumps(config))


def _text_model(folder: Path) -> Any:
    return mlx_lm.utils.load_model(folder, strict=False)[0]


def _takes(name: str, layer: Any) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % GROUP == 0


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """A foreseeable tiny model with a head, by family name; in four bits if asked for."""

    @cache
    def get(family: str, *, bits: int = 16, **more: Any) -> Tiny:
        folder = tmp_path_factory.mktemp("mtp") / family
        build(folder, family, **{"foreseeable": True, "mtp_num_hidden_layers": 1} | more)
        if bits == 4:
            quantise(folder, family_named(family).library == "mlx_vlm")
        return Tiny(folder, load(folder))

    return get
