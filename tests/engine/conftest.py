"""One tiny model for the engine's own tests."""

from pathlib import Path

import pytest

from equipped import equipped
from mlx_provider import LoadOptions
from mlx_provider.families.text import TextModel, load_text
from tiny import build

COMPUTE = """embedding_steps hidden_states kernels_in_use merged_memory mixed_batches
prefix_restore prompt_logprobs rows_as_entries sharing speculation"""
AGAIN = {f"test_{name}" for name in COMPUTE.split()}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a plugin's kernels, run only tests whose results are those of a model's functions."""
    other = collection_path.stem.startswith("test_") and collection_path.stem not in AGAIN
    return (other and bool(config.getoption("--without-plugin"))) or None


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = build(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")
    return equipped(load_text(folder, LoadOptions()))
