"""Sizes of images, and rotary positions on three axes: time, height and width (M-RoPE). Upstream's
functions for positions are not used: they store those of one request on the model object."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...errors import MediaError
from ...records import MediaItem, MediaSpan, PrefillChunk


def image_size(item: MediaItem) -> tuple[int, int]:
    """Height and width in pixels. Raises `MediaError` for other media."""
    if item.kind != "image":
        raise MediaError("this model takes images but no video")
    if len(item.shape) != 3 or item.shape[-1] != 3 or 0 in item.shape:
        raise MediaError(f"an image must be height, width, 3; this one is {item.shape}")
    return item.shape[0], item.shape[1]


def as_image(item: MediaItem, max_pixels: int) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of an image, at most `max_pixels`. Raises `MediaError` for other media."""
    height, width = image_size(item)
    if height * width <= max_pixels:
        return item.pixels
    scale = (max_pixels / (height * width)) ** 0.5
    return item.scale(max(1, int(height * scale)), max(1, int(width * scale)))


def rotary_positions(length: int, spans: Sequence[MediaSpan]) -> tuple[NDArray[np.int32], int]:
    """M-RoPE positions (3, length) of a prompt, and its `Prompt.rope_delta`. Text advances all
    three axes by one; a media span advances them by its longest side. The `inputs` of a span have
    `grid`, its patches in time, height and width, and `merge`, the patches per side of a token."""
    positions = np.empty((3, length), np.int32)
    at = following = 0
    for span in spans:
        text = span.start - at
        positions[:, at : span.start] = np.arange(following, following + text)
        following += text
        t, h, w = span.inputs.grid
        shape = (t, h // span.inputs.merge, w // span.inputs.merge)
        axes = np.indices(shape, dtype=np.int32).reshape(3, -1)
        positions[:, span.start : span.end] = following + axes
        following += max(shape)
        at = span.end
    positions[:, at:] = np.arange(following, following + length - at)
    return positions, following - at


def chunk_positions(chunk: PrefillChunk) -> mx.array:
    """Positions (3, 1, length) of a chunk's tokens."""
    length = chunk.stop - chunk.start
    if chunk.prompt.positions is None:
        return mx.broadcast_to(mx.arange(chunk.start, chunk.stop)[None, None], (3, 1, length))
    return mx.array(chunk.prompt.positions[:, None, chunk.start : chunk.stop])


def step_positions(positions: mx.array) -> mx.array:
    """Positions (3, rows, 1) of one new token for each row. `positions`: (rows,)."""
    return mx.broadcast_to(positions[None, :, None], (3, positions.size, 1))
