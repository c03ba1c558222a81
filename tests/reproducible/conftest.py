"""Tiny models in the formats that users run, and what a request gives by itself."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.nn as nn
import pytest

from equipped import equipped, load_by_family
from mlx_provider import LoadedModel
from tiny import build

Load = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tiny model by family and format: a dtype, or `4 bit`."""

    @cache
    def made(family: str, kept_in: str = "float32", **overrides: Any) -> LoadedModel:
        dtype = "bfloat16" if kept_in == "4 bit" else kept_in
        folder = tmp_path_factory.mktemp("reproducible") / family
        model = load_by_family(build(folder, family, dtype=dtype, **overrides))
        if kept_in == "4 bit":
            whole = model.model
            text = getattr(whole, "language_model", whole)
            nn.quantize(text, group_size=32, bits=4, class_predicate=_divisible)
        return equipped(model)

    return made


def _divisible(path: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0
