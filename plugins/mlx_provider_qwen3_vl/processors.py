"""mlx-vlm's numpy processors for patches, size by size and strip by strip.

mlx_vlm/models/qwen3_vl/processing_qwen3_vl.py 0.7.10: what is public there takes a whole request
and makes all of its patches at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ANY_PIXELS = 2**40
"""Bound for what is scaled already."""


def image_processor(folder: Path) -> Any:
    """Has `min_pixels`, `max_pixels`, `patch_size` and `merge_size`."""
    from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream

    return upstream.Qwen3VLImageProcessor(**upstream._qwen_vl_image_kwargs(folder))


def frame_processor(folder: Path, **more: Any) -> Any:
    """The same with `temporal_patch_size` and `fps`; `more` replaces what the folder says."""
    from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream

    return upstream.Qwen3VLVideoProcessor(**{**upstream._qwen_vl_video_kwargs(folder), **more})


def scaled_frame_processor(folder: Path) -> Any:
    """For frames that are scaled already."""
    return frame_processor(folder, min_pixels=1, max_pixels=ANY_PIXELS)


def image_scale(images: Any, height: int, width: int, most: int) -> tuple[int, int]:
    """Height and width that an image is scaled to, within `most` pixels. Raises `ValueError`."""
    scaled: tuple[int, int] = images._resolved_size(height, width, max_pixels=most)
    return scaled


def image_patches(images: Any, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Patches of scaled pixels (3, height, width)."""
    made, _ = images._process_one(pixels, min_pixels=1, max_pixels=ANY_PIXELS)
    return np.asarray(made, np.float32)


def frame_scale(frames: Any, count: int, height: int, width: int) -> tuple[int, int]:
    """Height and width that each of `count` frames is scaled to. Raises `ValueError`."""
    from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream

    scaled: tuple[int, int] = upstream._smart_resize_video(
        count, height, width, frames.temporal_patch_size, frames.patch_size * frames.merge_size,
        frames.min_pixels, frames.max_pixels,
    )  # fmt: skip
    return scaled


def frame_patches(frames: Any, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Patches of scaled frames (frames, 3, height, width); `frames`: `scaled_frame_processor`."""
    made, _ = frames._process_one(pixels)
    return np.asarray(made, np.float32)
