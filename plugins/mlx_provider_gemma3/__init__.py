"""Gemma 3 with vision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import LoadedModel, LoadOptions, ModelFamily, hookimpl

mlx_provider_api = 1


def matches(config: Mapping[str, Any]) -> int:
    """10 for a Gemma 3 checkpoint with a vision tower."""
    return 10 if config.get("model_type") == "gemma3" and config.get("vision_config") else 0


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    """Load a checkpoint folder."""
    from .model import load_gemma

    return load_gemma(folder, options)


@hookimpl
def mlx_model_families() -> Iterable[ModelFamily]:
    """Gemma 3."""
    yield ModelFamily("gemma3", matches, load, serves="Gemma 3: text and images")
