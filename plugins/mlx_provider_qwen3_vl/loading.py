"""Models whose images and frames are cut into patches as those of Qwen3-VL."""

from __future__ import annotations

from pathlib import Path

from mlx_provider import LoadedModel, LoadOptions
from mlx_provider.families.vision.patch_model import load_patch_model
from mlx_provider.families.vision.patches import PatchTexts

from . import processors

TEXTS = PatchTexts(
    image="<|image_pad|>",
    frames="<|video_pad|>",
    start="<|vision_start|>",
    end="<|vision_end|>",
    time="<{seconds:.1f} seconds>",
)


def load_with_patches(folder: Path, options: LoadOptions) -> LoadedModel:
    """Raises `UnsupportedModel` and `BadRequest`."""
    return load_patch_model(folder, options, TEXTS, processors)
