"""Tiny models, built once."""

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from equipped import equipped, load_by_family
from mlx_provider import LoadOptions, MediaItem
from mlx_provider.families.text import TextModel, load_text
from tiny import build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TextModel]:
    """A loaded tiny float32 model by family name and changes to its config."""

    @cache
    def get(family: str, **overrides: Any) -> TextModel:
        folder = build(tmp_path_factory.mktemp("tiny") / family, family, **overrides)
        return equipped(load_text(folder, LoadOptions()))

    return get


@pytest.fixture
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, MediaItem]]:
    """A tiny vision model, by family name, and an image."""

    def get(family: str) -> tuple[Any, MediaItem]:
        folder = build(tmp_path_factory.mktemp("seeing") / family, family)
        pixels = np.random.default_rng(1).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        item = MediaItem.of("image", pixels, hashlib.sha256(pixels.tobytes()).hexdigest())
        return load_by_family(folder), item

    return get
