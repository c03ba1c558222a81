"""Qwen3-VL, dense and mixture of experts."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import LoadedModel, LoadOptions, ModelFamily, SamplingDefaults, hookimpl

mlx_provider_api = 1
MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")
SAMPLING = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20)
"""From the generation_config.json of the instruct models."""


def matches(config: Mapping[str, Any]) -> int:
    """Priority 10 for a checkpoint with a vision tower, else 0."""
    return 10 if config.get("model_type") in MODEL_TYPES and config.get("vision_config") else 0


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    from .model import load_patch_model

    return load_patch_model(folder, options)


@hookimpl
def mlx_model_families() -> Iterable[ModelFamily]:
    serves = "Qwen3-VL: text, images, video frames"
    sampling = dict.fromkeys(MODEL_TYPES, SAMPLING)
    yield ModelFamily("qwen3_vl", matches, load, serves=serves, sampling=sampling)
