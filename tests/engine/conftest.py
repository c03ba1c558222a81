"""One tiny model for the engine's own tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipped import equipped
from mlx_provider import LoadOptions
from mlx_provider.families.text import TextModel, load_text
from tiny import build

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a plugin's kernels, run only the tests of a model for which it has kernels."""
    if config.getoption("--without-plugin"):
        mine = [item for item in items if HERE in item.path.parents and not _is_equipped(item)]
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]


def _is_equipped(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    return "qwen3" in item.fixturenames or hasattr(item.module, "equipped")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = build(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")
    return equipped(load_text(folder, LoadOptions()))
