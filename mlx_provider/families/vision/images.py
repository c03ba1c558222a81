"""Still images of a request: their size, and their pixels within a limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import MediaError
from ...records import MediaItem


def image_size(item: MediaItem) -> tuple[int, int]:
    """Height and width. Raises `MediaError` for other media."""
    if item.kind != "image":
        raise MediaError("this model takes images but no video")
    if len(item.shape) != 3 or item.shape[-1] != 3 or 0 in item.shape:
        raise MediaError(f"an image must be height, width, 3; this one is {item.shape}")
    return item.shape[0], item.shape[1]


def as_image(item: MediaItem, max_pixels: int) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of a still image, scaled down to `max_pixels`. Raises `MediaError` for other
    media."""
    height, width = image_size(item)
    if height * width <= max_pixels:
        return item.pixels
    scale = (max_pixels / (height * width)) ** 0.5
    return item.scaled(max(1, int(height * scale)), max(1, int(width * scale)))
