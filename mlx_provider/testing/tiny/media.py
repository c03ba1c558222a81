"""Deterministic images and videos for tests."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from ...records import MediaItem


def tiny_pixels(seed: int, height: int = 96, width: int = 96) -> NDArray[np.uint8]:
    """(height, width, 3): six by six random patches."""
    patches = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    rows = np.arange(height) * 6 // height
    columns = np.arange(width) * 6 // width
    return np.ascontiguousarray(patches[rows][:, columns])


def tiny_image(seed: int, height: int = 96, width: int = 96) -> MediaItem:
    return _item("image", tiny_pixels(seed, height, width))


def tiny_video(seed: int, frames: int = 4, height: int = 64, width: int = 96) -> MediaItem:
    pixels = [tiny_pixels(seed * 1000 + i, height, width) for i in range(frames)]
    return _item("video", np.stack(pixels))


def _item(kind: str, pixels: NDArray[np.uint8]) -> MediaItem:
    key = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
    return MediaItem.of("video" if kind == "video" else "image", pixels, key)
