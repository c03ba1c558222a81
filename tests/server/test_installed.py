"""A machine without MLX."""

import sys

import pytest

from mlx_provider.errors import EngineUnavailable, NotInstalled
from mlx_provider.upstream.runtime import require_mlx


@pytest.mark.parametrize(
    ("platform", "remedy"), [("linux", r"\.\[cpu\].*\.\[cuda13\]"), ("darwin", "pip install mlx ")]
)
def test_an_engine_without_mlx_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, platform: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(NotInstalled, match=remedy):
        require_mlx()


@pytest.mark.parametrize("message", ["cudaMallocManaged(&data, size) failed", "out of memory"])
def test_an_error_of_a_full_gpu_is_not_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    """An H100 whose memory another process held had both in one message."""

    def full(name: str) -> None:
        raise ImportError(message)

    monkeypatch.setattr("importlib.import_module", full)
    with pytest.raises(EngineUnavailable, match="nvidia-smi") as raised:
        require_mlx()
    assert not isinstance(raised.value, NotInstalled)
