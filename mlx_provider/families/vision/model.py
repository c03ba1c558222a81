"""Common parts of the vision families: a loaded model, prompts with media spans, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ...records import (
    EmbedsInSlices,
    MediaItem,
    MediaSpan,
    ModelInfo,
    PrefillChunk,
    Prompt,
    Tokenizer,
)
from ..tokenizer import HFTokenizer
from .prompt import MediaMarks, build_prompt


@dataclass(frozen=True)
class VisionFeatures:
    rows: mx.array
    """(tokens of the span, hidden)."""
    deepstack: tuple[mx.array, ...] = ()
    """For each of the first layers: (tokens of the span, hidden), added to its output."""

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + sum(layer.nbytes for layer in self.deepstack))


@dataclass(frozen=True)
class Piece:
    """Tokens `start .. stop` of a chunk: text, or a part of one media span."""

    start: int
    stop: int
    features: VisionFeatures | None = None
    offset: int = 0


def pieces(chunk: PrefillChunk, stop: int | None = None) -> list[Piece]:
    end = chunk.stop if stop is None else stop
    found: list[Piece] = []
    at = chunk.start
    for span in chunk.prompt.spans:
        if span.end <= at or span.start >= end:
            continue
        if span.start > at:
            found.append(Piece(at, span.start))
            at = span.start
        upto = min(span.end, end)
        features = chunk.features[span.content_hash]
        found.append(Piece(at, upto, features, at - span.start))
        at = upto
    return [*found, Piece(at, end)] if at < end else found


def embeddings(
    chunk: PrefillChunk, parts: Sequence[Piece], embed_tokens: Callable[[mx.array], mx.array]
) -> mx.array:
    rows: list[mx.array] = []
    for part in parts:
        if part.features is None:
            text = mx.array(np.asarray(chunk.prompt.tokens[part.start : part.stop], np.int32))
            rows.append(embed_tokens(text))
        else:
            rows.append(media_rows(part, part.features.rows))
    dtype = next((r.dtype for r, p in zip(rows, parts, strict=True) if p.features is None), None)
    return mx.concatenate([r if dtype is None else r.astype(dtype) for r in rows])[None]


def media_rows(part: Piece, rows: mx.array) -> mx.array:
    return rows[part.offset : part.offset + part.stop - part.start]


class VisionModel:
    """The common part of a `LoadedModel` over mlx-vlm. Families add the device methods."""

    kv_layouts: Sequence[str] = ("merged", "solo")

    def __init__(
        self, model: Any, info: ModelInfo, tokenizer: HFTokenizer, marks: MediaMarks
    ) -> None:
        self.model = model
        self.info = info
        self.hf_tokenizer = tokenizer.reserving(marks.reserved).within(info.context_length)
        self.tokenizer: Tokenizer = self.hf_tokenizer
        self.marks = marks

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem],
        variables: Mapping[str, Any],
    ) -> Prompt:
        """Raises `BadRequest` and `MediaError`."""
        return build_prompt(
            self.hf_tokenizer,
            self.marks,
            self.info.stop_tokens,
            messages,
            tools=tools,
            media=media,
            variables=variables,
        )


def embedded(model: EmbedsInSlices, span: MediaSpan) -> Any:
    (features,) = [each for made in model.embed_in_slices([span]) for each in made]
    return features
