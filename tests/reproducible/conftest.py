"""Tiny models in the formats that users run, and what a request gives by itself."""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import pytest

from equipped import equipped
from mlx_provider import LoadedModel, LoadOptions
from mlx_provider.families.checkpoint import read_json
from mlx_provider.registry import PluginRegistry
from tiny import build

Load = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tiny model by family and format: a dtype, or `4 bit`."""
    registry = PluginRegistry.discover()
    loaded: dict[str, LoadedModel] = {}

    def made(family: str, kept_in: str = "float32", **overrides: Any) -> LoadedModel:
        key = f"{family} {kept_in} {overrides}"
        if key not in loaded:
            dtype = "bfloat16" if kept_in == "4 bit" else kept_in
            folder = tmp_path_factory.mktemp("reproducible") / family
            build(folder, family, dtype=dtype, **overrides)
            served, _ = registry.family_for(read_json(folder / "config.json"))
            model = served.load(folder, LoadOptions())
            if kept_in == "4 bit":
                whole: Any = model.model  # type: ignore[attr-defined]
                text = getattr(whole, "language_model", whole)
                nn.quantize(text, group_size=32, bits=4, class_predicate=_divisible)
            loaded[key] = equipped(model)
        return loaded[key]

    return made


def _divisible(path: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0
