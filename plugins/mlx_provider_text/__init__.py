"""The default family: any text model that mlx-lm knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import LoadedModel, LoadOptions, ModelFamily, hookimpl

mlx_provider_api = 1


@hookimpl
def mlx_model_families() -> Iterator[ModelFamily]:
    yield ModelFamily(
        name="text",
        matches=matches,
        load=load,
        serves="any text model of mlx-lm (Llama, Qwen, Gemma, Mistral, gpt-oss, ...)",
        recommended={"mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit": 17_200_000_000},
    )


def matches(config: Mapping[str, Any]) -> int:
    """The lowest priority: a family of its own comes first."""
    from mlx_provider.families.matching import known_to_mlx_lm

    return 1 if known_to_mlx_lm(config) else 0


def load(path: Path, options: LoadOptions) -> LoadedModel:
    """Load a folder with mlx-lm."""
    from mlx_provider.families.text import load_text

    return load_text(path, options)
