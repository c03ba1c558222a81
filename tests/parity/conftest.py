"""Tiny models, built once."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipped import equipped
from mlx_provider import LoadOptions, MediaItem
from mlx_provider.families.checkpoint import read_json
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.registry import PluginRegistry
from tiny import build


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


@pytest.fixture
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, MediaItem]]:
    """A tiny vision model, by family name, and an image."""

    def get(family: str) -> tuple[Any, MediaItem]:
        folder = build(tmp_path_factory.mktemp("seeing") / family, family)
        chosen, _ = PluginRegistry.discover({}).family_for(read_json(folder / "config.json"))
        pixels = np.random.default_rng(1).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        item = MediaItem.of("image", pixels, hashlib.sha256(pixels.tobytes()).hexdigest())
        return chosen.load(folder, LoadOptions()), item

    return get
