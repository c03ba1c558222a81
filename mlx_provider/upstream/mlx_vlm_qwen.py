"""What Qwen3-VL and Qwen3.5 share: patches, M-RoPE positions, prefill and decode.

Upstream: mlx_vlm/models/qwen3_vl and qwen3_5 (and their _moe twins), 0.7.10. Their text models
take explicit `position_ids`, so nothing is read from or left on the model object. mlx-vlm's own
chunking of deepstack features and its rope index are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import MediaError
from ..records import LoadOptions, MediaItem, MediaSpan, OnDemand, PrefillChunk, Prompt
from . import cpu_functions
from .attention import route
from .checkpoint import read_json
from .mlx_vlm import head, load_model, row_cache
from .mlx_vlm_model import (
    VisionFeatures,
    VisionModel,
    embeddings,
    image_size,
    media_rows,
    pieces,
)
from .mlx_vlm_prompt import Block, MediaMarks, Placed, no_media
from .mlx_vlm_tokenizer import load_tokenizer, vision_info

LOW_DETAIL_PIXELS = 512 * 512
"""Pixels of an image sent with OpenAI's `detail: low`."""
STRIP = 2**18
"""Pixels that are cut into patches at once."""
ANY_PIXELS = 2**40
"""Bound for what is scaled already."""


Cut = Callable[[NDArray[np.uint8]], Iterator[NDArray[np.float32]]]


@dataclass(frozen=True)
class Patches:
    """Input of the vision tower for one block.

    Pixels are kept as bytes: cut into patches they take eight times as much, so that is done
    right before the tower runs, a strip at a time.
    """

    grid: tuple[int, int, int]
    """Patches in time, height and width, before merging."""
    merge: int
    """Patches that become one token, per side."""
    pixels: OnDemand[NDArray[np.uint8]]
    """(frames,) height, width, 3, of which this block is `cut`."""
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


class QwenMedia:
    """Images and frames to patches, with mlx-vlm's numpy processors (no torch)."""

    def __init__(self, folder: Path) -> None:
        from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as upstream

        self.images = upstream.Qwen3VLImageProcessor(**upstream._qwen_vl_image_kwargs(folder))
        frames = upstream._qwen_vl_video_kwargs(folder)
        self.videos = upstream.Qwen3VLVideoProcessor(**frames)
        any_size = {"min_pixels": 1, "max_pixels": ANY_PIXELS}
        self._scaled_videos = upstream.Qwen3VLVideoProcessor(**{**frames, **any_size})
        self._video_size = upstream._smart_resize_video

    def place(self, item: MediaItem) -> Placed:
        """Text and blocks for one item. Raises `MediaError` for extreme aspect ratios."""
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
        block = self._block(item, pixels, self._image_strips, (1, h, w), 0)
        return Placed("<|image_pad|>", (block,))

    def _image_strips(self, pixels: NDArray[np.uint8]) -> Iterator[NDArray[np.float32]]:
        """Patches of whole rows of patches: their order is the image's."""
        height, width, _ = pixels.shape
        grain = self.images.patch_size * self.images.merge_size
        # no strip so flat that upstream would refuse it as an image
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
        scaled = self._video_size(
            count, height, width, span, size * videos.merge_size,
            videos.min_pixels, videos.max_pixels,
        )  # fmt: skip
        grid = (1, scaled[0] // size, scaled[1] // size)
        pixels = OnDemand(lambda: item.scaled(*scaled))
        blocks, text = [], []
        for group in range(-(-count // span)):
            # the mean time of the group's frames, at the rate the processor samples
            seconds = (group * span + (span - 1) / 2) / videos.fps
            cut = partial(self._video_group, group)
            blocks.append(self._block(item, pixels, cut, grid, group))
            text.append(f"<{seconds:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>")
        return Placed("".join(text), tuple(blocks))

    def _video_group(self, group: int, frames: NDArray[np.uint8]) -> Iterator[NDArray[np.float32]]:
        span = self.videos.temporal_patch_size
        chosen = frames[group * span : (group + 1) * span].transpose(0, 3, 1, 2)
        made, _ = self._scaled_videos._process_one(chosen)
        yield np.asarray(made, np.float32)

    def _block(
        self,
        item: MediaItem,
        pixels: OnDemand[NDArray[np.uint8]],
        cut: Cut,
        grid: tuple[int, int, int],
        group: int,
    ) -> Block:
        made = Patches(grid, self.images.merge_size, pixels, cut)
        # size and group are part of the key: one file at two sizes is two sets of features
        key = f"{item.content_hash}:{grid[1]}x{grid[2]}:{group}"
        return Block(made.tokens, key, made, pixels)


def rotary_positions(
    length: int, spans: Sequence[MediaSpan]
) -> tuple[NDArray[np.int32] | None, int]:
    """M-RoPE positions (3, length) and what to add to a token's index after the prompt.

    Text advances all three axes by one; a media span advances by its longest side.
    `None` where there is no media: positions are then 0 .. length - 1.
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


class QwenVision(VisionModel):
    """Prefill and decode through mlx-vlm's text model with explicit positions."""

    kv_layouts: Sequence[str] = ("grouped", "merged", "solo")

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem],
        variables: Mapping[str, Any],
    ) -> Prompt:
        prompt = super().prepare(messages, tools=tools, media=media, variables=variables)
        positions, delta = rotary_positions(len(prompt.tokens), prompt.spans)
        return replace(prompt, positions=positions, rope_delta=delta)

    def embed(self, span: MediaSpan) -> VisionFeatures:
        tower = self.model.vision_tower
        pixels = span.inputs.tower_input(tower.patch_embed.proj.weight.dtype)
        rows, deepstack = tower(pixels, mx.array([span.inputs.grid], dtype=mx.int32))
        features = VisionFeatures(rows, tuple(deepstack))
        mx.eval(features.rows, *features.deepstack)
        return features

    def make_cache(self) -> list[Any]:
        return row_cache(self.model.language_model)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        language = self.model.language_model
        parts = pieces(chunk)
        hidden = language.model(
            None,
            inputs_embeds=embeddings(chunk, parts, language.model.embed_tokens),
            cache=chunk.cache,
            position_ids=_chunk_positions(chunk),
            **_deepstack(chunk, parts),
        )
        return head(language, hidden[:, -1:])[0, 0]

    def decode(self, tokens: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        language = self.model.language_model
        rows = tokens.shape[0]
        hidden = language.model(
            tokens[:, None],
            cache=cache,
            position_ids=mx.broadcast_to(positions[None, :, None], (3, rows, 1)),
        )
        return head(language, hidden)[:, -1]


def _chunk_positions(chunk: PrefillChunk) -> mx.array:
    length = chunk.stop - chunk.start
    if chunk.prompt.positions is None:
        return mx.broadcast_to(mx.arange(chunk.start, chunk.stop)[None, None], (3, 1, length))
    return mx.array(chunk.prompt.positions[:, None, chunk.start : chunk.stop])


def _deepstack(chunk: PrefillChunk, parts: Sequence[Any]) -> dict[str, Any]:
    """Deepstack features of exactly the media tokens of this chunk, as the text model takes them.

    Upstream's `_deepstack_process` finds the rows by `numpy.where` on the mask of the batch.
    """
    media = [part for part in parts if part.features is not None and part.features.deepstack]
    if not media:
        return {}
    mask = np.zeros((1, chunk.stop - chunk.start), bool)
    for part in media:
        mask[0, part.start - chunk.start : part.stop - chunk.start] = True
    layers = zip(*(part.features.deepstack for part in media), strict=True)
    return {
        "visual_pos_masks": mask,
        "deepstack_visual_embeds": [
            mx.concatenate([media_rows(p, r) for p, r in zip(media, layer, strict=True)])
            for layer in layers
        ],
    }


def load_qwen(folder: Path, options: LoadOptions) -> QwenVision:
    """Load a Qwen3-VL or Qwen3.5 checkpoint with its vision tower."""
    tokenizer = load_tokenizer(folder, options)
    model = load_model(folder, options)
    config = read_json(folder / "config.json")
    media = QwenMedia(folder)
    sees = model.vision_tower is not None
    info = vision_info(
        folder,
        options,
        model,
        tokenizer,
        media=("image", "video") if sees else (),
        pixels=(media.images.min_pixels, media.images.max_pixels),
        image="<|image_pad|>",
    )
    marks = MediaMarks(
        placeholders={
            "image": "<|image_pad|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        }
        if sees
        else {},
        tokens=frozenset({int(config["image_token_id"]), int(config["video_token_id"])}),
        reserved=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        place=media.place if sees else no_media,
    )
    route(model.language_model)
    cpu_functions.adopt(model)
    return QwenVision(model, info, tokenizer, marks)
