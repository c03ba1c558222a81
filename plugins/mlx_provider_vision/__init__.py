"""Vision models of mlx-vlm without a family of their own."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import LoadedModel, LoadOptions, ModelFamily, hookimpl

mlx_provider_api = 1


def matches(config: Mapping[str, Any]) -> int:
    """Priority 2 for a checkpoint with a vision part that mlx-vlm knows, else 0."""
    from mlx_provider.families.checkpoint import known_to_mlx_vlm

    return 2 if config.get("vision_config") and known_to_mlx_vlm(config) else 0


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    from .loading import load_any

    return load_any(folder, options)


@hookimpl
def mlx_model_families() -> Iterable[ModelFamily]:
    serves = (
        "Qwen2-VL, Qwen2.5-VL and other vision models of mlx-vlm: text and images (where "
        "images cannot be embedded one by one, which `/v1/models` notes, none is reused)"
    )
    yield ModelFamily("vision", matches, load, serves=serves)
