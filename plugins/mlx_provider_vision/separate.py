"""A model that embeds each image separately, so that any prompt can reuse it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_provider import (
    BadRequest,
    Features,
    MediaItem,
    MediaSpan,
    OnDemand,
    PrefillChunk,
    Prompt,
    UnsupportedModel,
)
from mlx_provider.families.caches import row_cache
from mlx_provider.families.logits import Shown, last_token, narrowed, rows_at
from mlx_provider.families.vision.loading import has_mrope
from mlx_provider.families.vision.model import VisionFeatures, message_ends
from mlx_provider.families.vision.patches import rotary_positions

from . import passes
from .model import AnyVisionModel

Inputs = Mapping[str, np.ndarray]
KNOWN = 1024
"""Images whose tokens are remembered."""
EMBEDDED = {"inputs_embeds", "position_ids", "rope_deltas"}
"""Possible parts of a prompt's embeddings: rows of its tokens, and positions."""


@dataclass(frozen=True)
class Block:
    tokens: np.ndarray
    grid: tuple[int, ...]
    """Patches in time, height and width; empty: unknown."""


@dataclass(frozen=True)
class Alone:
    """One image of a prompt, for `rotary_positions` and `embed`."""

    inputs: OnDemand[dict[str, np.ndarray]]
    grid: tuple[int, ...]
    merge: int


class SeparateVisionModel(AnyVisionModel):
    """Every image is a separate span, identified by its content. Only for models in which
    `loading.problem_of` finds none."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._blocks: dict[str, Block] = {}
        """By content hash."""
        self._placeholder = self.hf_tokenizer.fast.token_to_id(self.image_text)
        vision = getattr(self.model.config, "vision_config", None)
        self._merge = int(getattr(vision, "spatial_merge_size", None) or 1)

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem],
        variables: Mapping[str, Any],
    ) -> Prompt:
        """Replaces each placeholder by the tokens of its image. Raises `BadRequest` (template,
        processor) and `MediaError` (video)."""
        hidden, text = self.hf_tokenizer.rendered(messages, tools, variables)
        text = self.with_places(hidden, text, len(media))
        tokens, spans = self._fill(self.hf_tokenizer.tokens(text, hidden), media)
        positions, delta = (None, 0)
        if has_mrope(self.model):
            positions, delta = rotary_positions(len(tokens), spans)
        ends = message_ends(tokens, self.info.stop_tokens)
        return Prompt(tokens, hidden.reveal(text), spans, positions, delta, ends)

    def inputs_of(self, span: MediaSpan) -> dict[str, np.ndarray]:
        return dict(span.inputs.inputs())

    def features_of(self, made: dict[str, mx.array]) -> Features:
        if more := made.keys() - EMBEDDED:
            raise UnsupportedModel(f"its images are more than embeddings: {', '.join(more)}")
        return VisionFeatures(made["inputs_embeds"][0])

    def make_cache(self) -> list[Any]:
        return row_cache(self.model.language_model)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        return passes.prefill_separately(self._prefill_model, chunk)

    def decode(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> mx.array:
        return rows_at(logits_at)(passes.decode_separately(self.model, tokens, cache, positions))

    @property
    def shows_hidden(self) -> bool:
        return self.backbone is not None

    def prefill_hidden(self, chunk: PrefillChunk, last: int) -> tuple[mx.array, mx.array]:
        shown = Shown(last_token, lambda states: states[:, -last:])
        model = narrowed(self.model, self.backbone, shown)
        return passes.prefill_separately(model, chunk), shown.hidden[0]

    def decode_hidden(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        shown = Shown(rows_at(logits_at))
        model = narrowed(self.model, self.backbone, shown)
        logits = passes.decode_separately(model, tokens, cache, positions)
        return logits, shown.hidden[:, -1]

    def _fill(
        self, short: Sequence[int], media: Sequence[MediaItem]
    ) -> tuple[list[int], list[MediaSpan]]:
        tokens: list[int] = []
        spans: list[MediaSpan] = []
        waiting = iter(media)
        for token in short:
            item = next(waiting, None) if token == self._placeholder else None
            if item is None:
                tokens.append(token)
                continue
            spans.append(self._span(item, len(tokens), tokens))
        if len(spans) != len(media):
            raise BadRequest(f"the tokenizer does not keep {self.image_text!r} whole")
        return tokens, spans

    def _span(self, item: MediaItem, start: int, tokens: list[int]) -> MediaSpan:
        inputs = OnDemand(lambda: self.process(self.image_text, [item]))
        block = self._blocks.get(item.content_hash) or _block(inputs())
        self._blocks[item.content_hash] = block
        while len(self._blocks) > KNOWN:
            self._blocks.pop(next(iter(self._blocks)), None)
        tokens += block.tokens.tolist()
        key = f"{item.content_hash}:{len(block.tokens)}:{block.grid}"
        alone = Alone(inputs, block.grid, self._merge)
        return MediaSpan(start, len(tokens), key, alone, inputs)


def _block(inputs: Inputs) -> Block:
    grids = inputs.get("image_grid_thw")
    grid = () if grids is None else tuple(int(side) for side in grids[0])
    return Block(inputs["input_ids"][0].astype(np.int32), grid)
