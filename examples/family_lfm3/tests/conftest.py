"""The reference's checkpoint with its weights in float32, for tests and for
`pytest --mlx-conformance lfm3`."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import pytest

REFERENCE = Path(__file__).parent / "reference"
WEIGHTS = "model.safetensors"
Write = Callable[[Path], Path]


def write_in_float32(folder: Path) -> Path:
    """A folder that may be there, and be empty."""
    shutil.copytree(REFERENCE, folder, dirs_exist_ok=True)
    weights = mx.load(str(REFERENCE / WEIGHTS))
    wide = {name: value.astype(mx.float32) for name, value in weights.items()}
    mx.save_safetensors(str(folder / WEIGHTS), wide, {"format": "pt"})
    return folder


@pytest.fixture
def in_float32() -> Write:
    return write_in_float32


@pytest.hookimpl(optionalhook=True)
def pytest_mlx_conformance_models(name: str) -> Mapping[str, Write]:
    """Checkpoints of a plugin, by label."""
    return {"tiny": write_in_float32} if name == "lfm3" else {}
