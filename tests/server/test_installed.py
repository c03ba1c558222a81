"""A machine without MLX."""

from __future__ import annotations

import sys

import pytest

from mlx_provider.errors import NotInstalled
from mlx_provider.upstream.installed import require_mlx


@pytest.mark.parametrize(
    ("platform", "remedy"),
    [("linux", r"mlx-provider\[cpu\].*mlx-provider\[cuda13\]"), ("darwin", "pip install mlx ")],
)
def test_without_mlx_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, platform: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(NotInstalled, match=remedy):
        require_mlx()
