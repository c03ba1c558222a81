"""Turns images and video frames into patches with mlx-vlm's numpy processors. Their private methods
(mlx_vlm/models/qwen3_vl/processing_qwen3_vl.py 0.7.10) process one strip of an image or one group
of frames at a time. The public ones would make all patches of a request at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream
from numpy.typing import NDArray

from mlx_provider import MediaError, MediaItem, OnDemand
from mlx_provider.families.vision.model import Block, ExpandedItem
from mlx_provider.families.vision.patches import image_size

IMAGE, FRAMES = "<|image_pad|>", "<|video_pad|>"
START, END = "<|vision_start|>", "<|vision_end|>"
TIME = "<{seconds:.1f} seconds>"
GROUP = f"{START}{FRAMES}{END}"
"""Text of a group of frames, after its `TIME`. A rendered template has one `GROUP` per video."""
LOW_DETAIL_PIXELS = 512 * 512
"""Most pixels of an image sent with OpenAI's `detail: low`."""
ANY_PIXELS = 2**40
"""No limit, for pixels that are scaled already."""
STRIP_PIXELS = 2**18
"""Pixels of an image that become patches together."""
Pixels = NDArray[np.uint8]
Cut = Callable[[Pixels], Iterator[NDArray[np.float32]]]
"""(pixels of an item) -> patches of one block, in arrays (patches, values of one patch)."""


@dataclass(frozen=True)
class Patches:
    """Input of the vision tower for one block. Pixels stay bytes until the tower runs, because
    patches take eight times as much memory."""

    grid: tuple[int, int, int]
    """(time, height, width) in patches, before merging."""
    merge: int
    """Patches per side that become one token."""
    pixels: OnDemand[Pixels]
    """Of the whole item: ([frames,] height, width, 3). `cut` takes this block's part of them."""
    cut: Cut

    @property
    def tokens(self) -> int:
        """Number of tokens that represent the block in a prompt."""
        t, h, w = self.grid
        return t * (h // self.merge) * (w // self.merge)

    def tower_input(self, dtype: mx.Dtype) -> mx.array:
        """All patches of the block: (t * h * w of `grid`, values of one patch)."""
        parts = []
        for strip in self.cut(self.pixels()):
            parts.append(mx.array(strip).astype(dtype))
            mx.eval(parts[-1])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)


class PatchMedia:
    """The image and video processors of a checkpoint's folder."""

    def __init__(self, folder: Path) -> None:
        video_options = upstream._qwen_vl_video_kwargs(folder)
        any_size = {"min_pixels": 1, "max_pixels": ANY_PIXELS}
        self.images = upstream.Qwen3VLImageProcessor(**upstream._qwen_vl_image_kwargs(folder))
        self.videos = upstream.Qwen3VLVideoProcessor(**video_options)
        self._any_size_videos = upstream.Qwen3VLVideoProcessor(**video_options | any_size)

    def expand(self, item: MediaItem) -> ExpandedItem:
        """The text and the blocks of an item. Its pixels are scaled later, on demand. Raises
        `MediaError` for extreme aspect ratios, and for a video smaller than a merged patch."""
        try:
            return self._video(item) if item.kind == "video" else self._image(item)
        except ValueError as error:
            raise MediaError(f"the {item.kind} cannot be used: {error}") from error

    def _image(self, item: MediaItem) -> ExpandedItem:
        height, width = image_size(item)
        limit = self.images.max_pixels
        if item.detail == "low":
            limit = min(limit, max(LOW_DETAIL_PIXELS, self.images.min_pixels))
        scaled = self.images._resolved_size(height, width, max_pixels=limit)
        h, w = (side // self.images.patch_size for side in scaled)
        pixels = OnDemand(lambda: item.scale(*scaled))
        patches = Patches((1, h, w), self.images.merge_size, pixels, self._image_strips)
        return ExpandedItem(IMAGE, (_block(item, patches),))

    def _image_strips(self, pixels: Pixels) -> Iterator[NDArray[np.float32]]:
        """Patches of one strip after another, from top to bottom. A strip has whole rows of merged
        patches; the last one may have almost twice as many."""
        height, width, _ = pixels.shape
        merged_side = self.images.patch_size * self.images.merge_size
        # upstream refuses one side of more than 200 times the other: at most 100 times as wide
        rows = max(STRIP_PIXELS // width, width // 100, 1)
        rows = -(-rows // merged_side) * merged_side
        tops = [*range(0, max(1, height - rows + 1), rows), height]
        for top, bottom in pairwise(tops):
            strip = pixels[top:bottom].transpose(2, 0, 1)
            made, _ = self.images._process_one(strip, min_pixels=1, max_pixels=ANY_PIXELS)
            yield np.asarray(made, np.float32)

    def _video(self, item: MediaItem) -> ExpandedItem:
        count, height, width, _ = item.shape
        videos = self.videos
        size, span = videos.patch_size, videos.temporal_patch_size
        factor, limits = size * videos.merge_size, (videos.min_pixels, videos.max_pixels)
        scaled = upstream._smart_resize_video(count, height, width, span, factor, *limits)
        grid = (1, scaled[0] // size, scaled[1] // size)
        pixels = OnDemand(lambda: item.scale(*scaled))
        blocks, text = [], []
        for group in range(-(-count // span)):
            # the mean time of the group's frames, at the sampling rate of the processor
            seconds = (group * span + (span - 1) / 2) / videos.fps
            patches = Patches(grid, videos.merge_size, pixels, partial(self._video_group, group))
            blocks.append(_block(item, patches, group))
            text.append(TIME.format(seconds=seconds) + GROUP)
        return ExpandedItem("".join(text), tuple(blocks))

    def _video_group(self, group: int, frames: Pixels) -> Iterator[NDArray[np.float32]]:
        span = self.videos.temporal_patch_size
        chosen = frames[group * span : (group + 1) * span].transpose(0, 3, 1, 2)
        made, _ = self._any_size_videos._process_one(chosen)
        yield np.asarray(made, np.float32)


def _block(item: MediaItem, patches: Patches, group: int = 0) -> Block:
    # size and group are part of the key: one file at two sizes has two sets of features
    _, height, width = patches.grid
    key = f"{item.content_hash}:{height}x{width}:{group}"
    return Block(patches.tokens, key, patches, patches.pixels)
