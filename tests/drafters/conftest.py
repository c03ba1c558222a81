"""One tiny model, and models that guess for it or may not."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from equipped import equipped
from mlx_provider import LoadOptions
from mlx_provider.families.text import TextModel, load_text
from tiny import build

Folders = Callable[..., Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a tiny model by family and changes to its config."""

    @cache
    def get(family: str, **more: Any) -> Path:
        return build(tmp_path_factory.mktemp("tiny") / family, family, **more)

    return get


@pytest.fixture(scope="session")
def qwen3(folder: Folders) -> TextModel:
    return equipped(load_text(folder("qwen3"), LoadOptions()))
