"""Images and frames of any size as patches, in strips, and their rotary positions on three axes:
time, height and width (M-RoPE). Upstream stores its own on the model object, for one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...errors import MediaError
from ...records import MediaItem, MediaSpan, OnDemand, PrefillChunk
from .model import Block, Placed


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


LOW_DETAIL_PIXELS = 512 * 512
"""For images sent with OpenAI's `detail: low`."""
STRIP = 2**18
Pixels = NDArray[np.uint8]
Cut = Callable[[Pixels], Iterator[NDArray[np.float32]]]


@dataclass(frozen=True)
class Patches:
    """Input of the vision tower for one block. Pixels stay bytes (patches take eight times as much)
    until the tower runs."""

    grid: tuple[int, int, int]
    """Patches in time, height and width, before merging."""
    merge: int
    """Patches per side that become one token."""
    pixels: OnDemand[Pixels]
    """Of the whole item: ([frames,] height, width, 3). `cut` takes this block's part of it."""
    cut: Cut

    @property
    def tokens(self) -> int:
        t, h, w = self.grid
        return t * (h // self.merge) * (w // self.merge)

    def tower_input(self, dtype: mx.Dtype) -> mx.array:
        """(grid t * h * w, values of one patch)."""
        parts = []
        for strip in self.cut(self.pixels()):
            parts.append(mx.array(strip).astype(dtype))
            mx.eval(parts[-1])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)


@dataclass(frozen=True)
class PatchTexts:
    """The texts for images and frames in a family's template and tokenizer: one token each, except
    for `time`."""

    image: str
    frames: str
    start: str
    end: str
    time: str
    """Precedes a group of frames; `{seconds}` is its time."""

    @property
    def group(self) -> str:
        """One group of frames, and a whole video in a rendered template."""
        return f"{self.start}{self.frames}{self.end}"

    @property
    def all(self) -> tuple[str, ...]:
        """Texts that users must not produce by typing them."""
        return (self.image, self.frames, self.start, self.end)


class PatchProcessors(Protocol):
    """A family's functions to scale and cut media. A module may implement it.

    Processors have `patch_size`, `merge_size`, `min_pixels` and `max_pixels`, those of frames also
    `temporal_patch_size` and `fps`. Scales are heights and widths. An aspect ratio that the model
    does not support raises `ValueError`.
    """

    def image_processor(self, folder: Path, /) -> Any: ...
    def frame_processor(self, folder: Path, /) -> Any: ...
    def scaled_frame_processor(self, folder: Path, /) -> Any: ...
    def image_scale(
        self, images: Any, height: int, width: int, most: int, /
    ) -> tuple[int, int]: ...
    def image_patches(self, images: Any, pixels: Pixels, /) -> NDArray[np.float32]: ...
    def frame_scale(
        self, frames: Any, count: int, height: int, width: int, /
    ) -> tuple[int, int]: ...
    def frame_patches(self, frames: Any, pixels: Pixels, /) -> NDArray[np.float32]: ...


class PatchMedia:
    def __init__(self, folder: Path, texts: PatchTexts, processors: PatchProcessors) -> None:
        self.texts = texts
        self._processors = processors
        self.images = processors.image_processor(folder)
        self.videos = processors.frame_processor(folder)
        self._scaled_videos = processors.scaled_frame_processor(folder)

    def place(self, item: MediaItem) -> Placed:
        """Raises `MediaError` for extreme aspect ratios."""
        try:
            return self._video(item) if item.kind == "video" else self._image(item)
        except ValueError as error:
            raise MediaError(f"the {item.kind} cannot be used: {error}") from error

    def _image(self, item: MediaItem) -> Placed:
        height, width = image_size(item)
        limit = self.images.max_pixels
        if item.detail == "low":
            limit = min(limit, max(LOW_DETAIL_PIXELS, self.images.min_pixels))
        scaled = self._processors.image_scale(self.images, height, width, limit)
        h, w = (side // self.images.patch_size for side in scaled)
        pixels = OnDemand(lambda: item.scaled(*scaled))
        block = self._block(item, pixels, self._image_strips, (1, h, w), 0)
        return Placed(self.texts.image, (block,))

    def _image_strips(self, pixels: Pixels) -> Iterator[NDArray[np.float32]]:
        """Whole rows of patches, in the order of the image."""
        height, width, _ = pixels.shape
        grain = self.images.patch_size * self.images.merge_size
        # no strip is so flat that upstream would refuse it as an image
        rows = max(STRIP // width, width // 100, 1)
        rows = -(-rows // grain) * grain
        tops = [*range(0, max(1, height - rows + 1), rows), height]
        for top, bottom in pairwise(tops):
            strip = pixels[top:bottom].transpose(2, 0, 1)
            yield self._processors.image_patches(self.images, strip)

    def _video(self, item: MediaItem) -> Placed:
        count, height, width, _ = item.shape
        videos = self.videos
        size, span = videos.patch_size, videos.temporal_patch_size
        scaled = self._processors.frame_scale(videos, count, height, width)
        grid = (1, scaled[0] // size, scaled[1] // size)
        pixels = OnDemand(lambda: item.scaled(*scaled))
        blocks, text = [], []
        for group in range(-(-count // span)):
            # the mean time of the group's frames, at the sampling rate of the processor
            seconds = (group * span + (span - 1) / 2) / videos.fps
            cut = partial(self._video_group, group)
            blocks.append(self._block(item, pixels, cut, grid, group))
            text.append(self.texts.time.format(seconds=seconds) + self.texts.group)
        return Placed("".join(text), tuple(blocks))

    def _video_group(self, group: int, frames: Pixels) -> Iterator[NDArray[np.float32]]:
        span = self.videos.temporal_patch_size
        chosen = frames[group * span : (group + 1) * span].transpose(0, 3, 1, 2)
        yield self._processors.frame_patches(self._scaled_videos, chosen)

    def _block(
        self,
        item: MediaItem,
        pixels: OnDemand[Pixels],
        cut: Cut,
        grid: tuple[int, int, int],
        group: int,
    ) -> Block:
        made = Patches(grid, self.images.merge_size, pixels, cut)
        # size and group are part of the key: one file at two sizes has two sets of features
        key = f"{item.content_hash}:{grid[1]}x{grid[2]}:{group}"
        return Block(made.tokens, key, made, pixels)


def rotary_positions(
    length: int, spans: Sequence[MediaSpan]
) -> tuple[NDArray[np.int32] | None, int]:
    """M-RoPE positions (3, length), and what to add to the index of a generated token.

    Text advances all three axes by one; a media span advances by its longest side. `None` without
    media: positions are then 0 .. length - 1. The `inputs` of a span have its `grid`, patches in
    time, height and width, and `merge`, the patches per side of one token.
    """
    if not spans:
        return None, 0
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
    """(3, rows, 1), one new token for each row; `positions`: (rows,)."""
    return mx.broadcast_to(positions[None, :, None], (3, positions.size, 1))
