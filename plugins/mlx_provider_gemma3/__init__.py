"""Gemma 3, with and without vision."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import (
    LoadedModel,
    LoadOptions,
    ModelFamily,
    SamplingDefaults,
    UpstreamPatch,
    hookimpl,
)

mlx_provider_api = 1
SAMPLING = SamplingDefaults(temperature=1.0, top_p=0.95, top_k=64)
"""From the model's page on the Hub."""
PATCHES = (
    UpstreamPatch(
        "mlx_vlm.models.gemma3.language.LanguageModel.sanitize",
        "mlx-vlm 0.7.10",
        "an untied output matrix is overwritten, a quantised one cannot be tied",
    ),
)


def matches(config: Mapping[str, Any]) -> int:
    """Priority 10 for a checkpoint with a vision tower, else 0."""
    return 10 if config.get("model_type") == "gemma3" and config.get("vision_config") else 0


def matches_text(config: Mapping[str, Any]) -> int:
    """Priority 10 for other checkpoints of Gemma 3, else 0."""
    kind = config.get("model_type")
    return 10 if kind == "gemma3_text" or (kind == "gemma3" and not matches(config)) else 0


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    from .model import load_gemma

    return load_gemma(folder, options)


def load_text(folder: Path, options: LoadOptions) -> LoadedModel:
    from .model import load_gemma_text

    return load_gemma_text(folder, options)


@hookimpl
def mlx_model_families() -> Iterable[ModelFamily]:
    published = dict.fromkeys(("gemma3", "gemma3_text"), SAMPLING)
    serves = "Gemma 3: text and images"
    yield ModelFamily("gemma3", matches, load, serves, patches=PATCHES, sampling=published)
    serves = "Gemma 3 of text alone"
    yield ModelFamily("gemma3_text", matches_text, load_text, serves, sampling=published)
