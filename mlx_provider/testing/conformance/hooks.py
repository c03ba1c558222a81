"""The hook by which a plugin's author gives the checks something to run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


@pytest.hookspec
def pytest_mlx_conformance_models(  # type: ignore[empty-body]
    name: str,
) -> Mapping[str, Callable[[Path], object]]:
    """Tiny checkpoints for the record `name` of a plugin (a family, a drafter, kernels), by label.

    Each value writes one into the empty folder that it is given, as its users would download it:
    random weights, `config.json`, tokenizer, chat template. For a drafter it may return the
    `DraftOptions` to draft with. Put the hook into the `conftest.py` beside the plugin's tests.
    """
