"""The hook with which a plugin's author gives checkpoints to the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


@pytest.hookspec
def pytest_mlx_conformance_models(  # type: ignore[empty-body]
    name: str,
) -> Mapping[str, Callable[[Path], object]]:
    """Tiny checkpoints for the record `name` of a plugin (a family, a drafter, kernels), by label.

    Each value writes one into an empty folder, in the form that users download: random weights,
    `config.json`, tokenizer, chat template. For a drafter it may return the `DraftOptions`. Put the
    hook into the `conftest.py` of the plugin's tests.
    """
