"""An mlx-vlm model whose images are grids of patches of any size, with rotary positions on three
axes. Its text model takes explicit `position_ids`, and features that its first layers add to the
media tokens of a chunk (deepstack)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_provider import LoadOptions, MediaSpan, PrefillChunk
from mlx_provider.families.caches import route
from mlx_provider.families.checkpoint import read_json
from mlx_provider.families.layers import route_attention
from mlx_provider.families.logits import FromHidden, rows_at
from mlx_provider.families.tokenizer import load_tokenizer
from mlx_provider.families.vision.loading import load_model
from mlx_provider.families.vision.model import (
    MediaFormat,
    VisionFeatures,
    VisionModel,
    embeddings,
    head,
    media_rows,
    pieces,
    refuse_media,
    vision_info,
)
from mlx_provider.families.vision.patches import chunk_positions, step_positions

from .patches import END, FRAMES, GROUP, IMAGE, START, PatchMedia


class PatchVisionModel(FromHidden, VisionModel):
    """The loaded model. `FromHidden` makes `prefill` and `decode` of the methods below."""

    mrope = True

    def embed(self, span: MediaSpan) -> VisionFeatures:
        tower = self.model.vision_tower
        pixels = span.inputs.tower_input(tower.patch_embed.proj.weight.dtype)
        rows, deepstack = tower(pixels, mx.array([span.inputs.grid], dtype=mx.int32))
        return VisionFeatures(rows, tuple(deepstack))

    @property
    def has_hidden_states(self) -> bool:
        return True

    def prefill_hidden(self, chunk: PrefillChunk, last: int) -> tuple[mx.array, mx.array]:
        states = _states(self.model.language_model.model, chunk)
        return head(self.model.language_model, states[:, -1:])[0, 0], states[0, -last:]

    def prefill_logits(self, chunk: PrefillChunk) -> mx.array:
        return head(self.model.language_model, _states(self.model.language_model.model, chunk))[0]

    def decode_hidden(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        language = self.model.language_model
        keep, rotary = rows_at(logits_at), step_positions(positions)
        states = keep(language.model(tokens[:, None], cache=cache, position_ids=rotary))
        return head(language, states)[:, -1], states[:, -1]


def _states(text_model: Any, chunk: PrefillChunk) -> mx.array:
    """Append the chunk to the row's cache. Returns hidden states (1, length, hidden). `text_model`:
    the part of mlx-vlm's model below its output matrix."""
    parts = pieces(chunk)
    hidden: mx.array = text_model(
        None,
        inputs_embeds=embeddings(chunk, parts, text_model.embed_tokens),
        cache=chunk.cache,
        position_ids=chunk_positions(chunk),
        **_deepstack(chunk, parts),
    )
    return hidden


def _deepstack(chunk: PrefillChunk, parts: Sequence[Any]) -> dict[str, Any]:
    """Deepstack features of exactly the media tokens of this chunk, for the text model. Upstream's
    `_deepstack_process` finds the rows with `numpy.where` on the mask of the batch."""
    media = [part for part in parts if part.features is not None and part.features.deepstack]
    if not media:
        return {}
    mask = np.zeros((1, chunk.stop - chunk.start), bool)
    for part in media:
        mask[0, part.start - chunk.start : part.stop - chunk.start] = True
    layers = zip(*(part.features.deepstack for part in media), strict=True)
    rows = [mx.concatenate([*map(media_rows, media, layer)]) for layer in layers]
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": rows}


def load_patch_model(folder: Path, options: LoadOptions) -> PatchVisionModel:
    """Load Qwen3-VL, or another model whose images and frames are cut into the same patches. Raises
    `UnsupportedModel` and `BadRequest`."""
    tokenizer = load_tokenizer(folder, options)
    model = load_model(folder, options)
    config = read_json(folder / "config.json")
    media = PatchMedia(folder)
    sees = model.vision_tower is not None
    info = vision_info(
        folder,
        options,
        model,
        tokenizer,
        media=("image", "video") if sees else (),
        pixels=(media.images.min_pixels, media.images.max_pixels),
        image=IMAGE,
    )
    form = MediaFormat(
        placeholders={"image": IMAGE, "video": GROUP} if sees else {},
        tokens=frozenset({int(config["image_token_id"]), int(config["video_token_id"])}),
        reserved=(IMAGE, FRAMES, START, END),
        expand=media.expand if sees else refuse_media,
    )
    route_attention(model.language_model)
    vision_model = PatchVisionModel(model, info, tokenizer, form)
    one = mx.array([1])  # a token, and its position
    # finds recurrent layers by a pass of one token, so that prompt chunks can share their passes
    route(lambda cache: vision_model.decode(one, cache, one), vision_model.make_cache())
    return vision_model
