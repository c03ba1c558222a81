"""LFM3 of Liquid AI, which neither mlx-lm 0.32.2 nor mlx-vlm 0.7.10 has."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import LoadedModel, LoadOptions, ModelFamily, hookimpl

mlx_provider_api = 1


def matches(config: Mapping[str, Any]) -> int:
    """10: more than any family that takes what it can."""
    return 10 if config.get("model_type") == "lfm3" else 0


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    """Weights, tokenizer and chat template of a checkpoint of transformers, or of `convert`."""
    # here, since both import MLX: listing plugins must stay quick
    from mlx_provider.families.text import load_text

    from .model import Model, ModelArgs

    return load_text(folder, options, classes=lambda config: (Model, ModelArgs))


@hookimpl
def mlx_model_families() -> Iterator[ModelFamily]:
    """LFM3."""
    yield ModelFamily("lfm3", matches, load, serves="LFM3")
