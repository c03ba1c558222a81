"""Tiny models, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipped import equipped
from mlx_provider import LoadOptions
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.testing.tiny import build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TextModel]:
    """A loaded tiny float32 model by family name and changes to its config."""
    loaded: dict[str, TextModel] = {}

    def get(family: str, **overrides: Any) -> TextModel:
        key = f"{family} {overrides}"
        if key not in loaded:
            folder: Path = tmp_path_factory.mktemp("tiny") / family
            loaded[key] = equipped(load_text(build(folder, family, **overrides), LoadOptions()))
        return loaded[key]

    return get
