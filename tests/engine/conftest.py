"""One tiny model for the engine's own tests."""

from __future__ import annotations

import pytest

from equipped import equipped
from mlx_provider import LoadOptions
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.testing.tiny import build


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = build(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")
    return equipped(load_text(folder, LoadOptions()))
