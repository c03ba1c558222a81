"""mlx-vlm's numpy processors for patches, size by size and strip by strip. Public functions of
mlx_vlm/models/qwen3_vl/processing_qwen3_vl.py 0.7.10 make all patches of a request at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ANY_PIXELS = 2**40
"""No limit, for pixels that are scaled already."""


def image_processor(folder: Path) -> Any:
    """Has `min_pixels`, `max_pixels`, `patch_size` and `merge_size`."""
    from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream

    return upstream.Qwen3VLImageProcessor(**upstream._qwen_vl_image_kwargs(folder))


def frame_processor(folder: Path, **more: Any) -> Any:
    """Also has `temporal_patch_size` and `fps`; `more` overrides the folder's values."""
    from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream

    return upstream.Qwen3VLVideoProcessor(**{**upstream._qwen_vl_video_kwargs(folder), **more})


def scaled_frame_processor(folder: Path) -> Any:
    return frame_processor(folder, min_pixels=1, max_pixels=ANY_PIXELS)


def image_scale(images: Any, height: int, width: int, most: int) -> tuple[int, int]:
    """Scaled height and width, within `most` pixels. Raises `ValueError`."""
    scaled: tuple[int, int] = images._resolved_size(height, width, max_pixels=most)
    return scaled


def image_patches(images: Any, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """From scaled pixels (3, height, width)."""
    made, _ = images._process_one(pixels, min_pixels=1, max_pixels=ANY_PIXELS)
    return np.asarray(made, np.float32)


def frame_scale(frames: Any, count: int, height: int, width: int) -> tuple[int, int]:
    """Scaled height and width of each of `count` frames. Raises `ValueError`."""
    from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream

    scaled: tuple[int, int] = upstream._smart_resize_video(
        count, height, width, frames.temporal_patch_size, frames.patch_size * frames.merge_size,
        frames.min_pixels, frames.max_pixels,
    )  # fmt: skip
    return scaled


def frame_patches(frames: Any, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """From scaled frames (frames, 3, height, width); `frames`: `scaled_frame_processor`."""
    made, _ = frames._process_one(pixels)
    return np.asarray(made, np.float32)
