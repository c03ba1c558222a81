"""Images and frames of any size as patches, size by size and strip by strip, by mlx-vlm's numpy
processors. Public functions of mlx_vlm/models/qwen3_vl/processing_qwen3_vl.py 0.7.10 make all
patches of a request at once."""

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
from mlx_provider.families.vision.model import Block, Placed
from mlx_provider.families.vision.patches import image_size

IMAGE, FRAMES = "<|image_pad|>", "<|video_pad|>"
START, END = "<|vision_start|>", "<|vision_end|>"
TIME = "<{seconds:.1f} seconds>"
GROUP = f"{START}{FRAMES}{END}"
"""One group of frames, after its `TIME`, and a whole video in a rendered template."""
LOW_DETAIL_PIXELS = 512 * 512
"""For images sent with OpenAI's `detail: low`."""
ANY_PIXELS = 2**40
"""No limit, for pixels that are scaled already."""
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


class PatchMedia:
    def __init__(self, folder: Path) -> None:
        frames = upstream._qwen_vl_video_kwargs(folder)
        any_size = {"min_pixels": 1, "max_pixels": ANY_PIXELS}
        self.images = upstream.Qwen3VLImageProcessor(**upstream._qwen_vl_image_kwargs(folder))
        self.videos = upstream.Qwen3VLVideoProcessor(**frames)
        self._scaled_videos = upstream.Qwen3VLVideoProcessor(**frames | any_size)

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
        scaled = self.images._resolved_size(height, width, max_pixels=limit)
        h, w = (side // self.images.patch_size for side in scaled)
        pixels = OnDemand(lambda: item.scaled(*scaled))
        return Placed(IMAGE, (self._block(item, pixels, self._image_strips, (1, h, w), 0),))

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
            made, _ = self.images._process_one(strip, min_pixels=1, max_pixels=ANY_PIXELS)
            yield np.asarray(made, np.float32)

    def _video(self, item: MediaItem) -> Placed:
        count, height, width, _ = item.shape
        videos = self.videos
        size, span = videos.patch_size, videos.temporal_patch_size
        scaled = upstream._smart_resize_video(
            count, height, width, span, size * videos.merge_size,
            videos.min_pixels, videos.max_pixels,
        )  # fmt: skip
        grid = (1, scaled[0] // size, scaled[1] // size)
        pixels = OnDemand(lambda: item.scaled(*scaled))
        blocks, text = [], []
        for group in range(-(-count // span)):
            # the mean time of the group's frames, at the sampling rate of the processor
            seconds = (group * span + (span - 1) / 2) / videos.fps
            cut = partial(self._video_group, group)
            blocks.append(self._block(item, pixels, cut, grid, group))
            text.append(TIME.format(seconds=seconds) + GROUP)
        return Placed("".join(text), tuple(blocks))

    def _video_group(self, group: int, frames: Pixels) -> Iterator[NDArray[np.float32]]:
        span = self.videos.temporal_patch_size
        chosen = frames[group * span : (group + 1) * span].transpose(0, 3, 1, 2)
        made, _ = self._scaled_videos._process_one(chosen)
        yield np.asarray(made, np.float32)

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
