"""Tiny models in the formats that users run, and what a request gives by itself."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from equipped import equipped, in_four_bits, load_by_family
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
        return equipped(in_four_bits(model) if kept_in == "4 bit" else model)

    return made
