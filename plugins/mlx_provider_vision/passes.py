"""Prefill and decode of a model of which only mlx-vlm's calls are known. Embeddings of a whole
prompt, or of one image, are the model's; what else they return are arguments of the language
model's prefill, which aligns them by its cache's offset. M-RoPE models get every row's position."""

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_provider import MediaSpan, PrefillChunk
from mlx_provider.families.caches import StateCache, row_cache
from mlx_provider.families.vision.loading import embedded, has_mrope, language_logits
from mlx_provider.families.vision.model import embeddings, pieces
from mlx_provider.families.vision.patches import chunk_positions, step_positions


def make_cache(model: Any) -> list[Any]:
    """M-RoPE models get a last entry with the row's rotary delta."""
    entries = row_cache(model.language_model)
    return [*entries, StateCache(1)] if has_mrope(model) else entries


def prefill(model: Any, chunk: PrefillChunk) -> mx.array:
    """Append a chunk; logits (vocab,) after the prompt's last token. Tokens from the first image to
    the last pass through the model together, when a chunk touches them, so the cache may be ahead
    of the chunk."""
    logits = mx.zeros(1)
    for span in chunk.prompt.spans:
        if _count_held(chunk) < min(span.start, chunk.stop):
            logits = _text(model, chunk, min(span.start, chunk.stop))
        if span.start < chunk.stop and _count_held(chunk) < span.end:
            # The prompt's last token must stay for the call that gives logits.
            end = min(span.end, max(chunk.stop, len(chunk.prompt.tokens) - 1))
            logits = _media(model, chunk, span, end)
    return _text(model, chunk, chunk.stop) if _count_held(chunk) < chunk.stop else logits


def prefill_separately(model: Any, chunk: PrefillChunk) -> mx.array:
    """Append a chunk of text and separately embedded images; see `prefill`. The cache is
    `row_cache`'s; M-RoPE models take the prompt's positions."""
    parts = pieces(chunk)
    ids = mx.array(np.asarray(chunk.prompt.tokens[chunk.start : chunk.stop], np.int32))[None]
    more: dict[str, Any] = {}
    if any(part.features is not None for part in parts):
        text_rows = lambda text: embedded(model, {"input_ids": text[None]})["inputs_embeds"][0]  # noqa: E731
        more["inputs_embeds"] = embeddings(chunk, parts, text_rows)
        more["n_to_process"] = chunk.stop - chunk.start
    if has_mrope(model):
        more |= {"position_ids": chunk_positions(chunk), "rope_deltas": mx.zeros((1, 1), mx.int32)}
    return language_logits(model, ids, chunk.cache, more)[0, -1]


def decode_separately(
    model: Any, tokens: mx.array, cache: list[Any], positions: mx.array
) -> mx.array:
    """See `decode`; `positions` are rotary ones, and the cache holds none."""
    more = {}
    if has_mrope(model):
        more["position_ids"] = step_positions(positions)
        more["rope_deltas"] = mx.zeros((positions.size, 1), mx.int32)
    return language_logits(model, tokens[:, None], cache, more)[:, -1]


def _count_held(chunk: PrefillChunk) -> int:
    """Tokens in the row's cache; a cache without attention layers is never ahead."""
    offsets = [int(entry.offset) for entry in chunk.cache if hasattr(entry, "offset")]
    return max(offsets, default=chunk.start)


def _text(model: Any, chunk: PrefillChunk, stop: int) -> mx.array:
    tokens = np.asarray(chunk.prompt.tokens[_count_held(chunk) : stop], np.int32)
    return _step(model, mx.array(tokens)[None], chunk.cache)


def _media(model: Any, chunk: PrefillChunk, span: MediaSpan, end: int) -> mx.array:
    start = _count_held(chunk)
    more = dict(chunk.features[span.content_hash].arrays)
    embedded = more.pop("inputs_embeds")
    if "position_ids" in more:
        more["position_ids"] = more["position_ids"][..., start:end]
    if has_mrope(model):
        chunk.cache[-1][0] = more.get("rope_deltas", mx.zeros((1, 1), mx.int32))
    ids = mx.array(np.asarray(chunk.prompt.tokens[start:end], np.int32))[None]
    # A slice: some models scale given embeddings in place.
    rows = embedded[:, start:end]
    return _step(model, ids, chunk.cache, inputs_embeds=rows, n_to_process=end - start, **more)


def decode(model: Any, tokens: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
    """One token of every row; logits (B, vocab). `positions`: tokens before each, (B,)."""
    more = {}
    if has_mrope(model):
        at = positions + cache[-1][0].reshape(-1)
        more["position_ids"] = step_positions(at)
    return _logits(model, tokens[:, None], cache, **more)[:, -1]


def _step(model: Any, ids: mx.array, cache: list[Any], **more: Any) -> mx.array:
    if has_mrope(model) and cache[-1][0] is None:
        cache[-1][0] = mx.zeros((1, 1), mx.int32)
    return _logits(model, ids, cache, **more)[0, -1]


def _logits(model: Any, ids: mx.array, cache: list[Any], **more: Any) -> mx.array:
    if not has_mrope(model):
        return language_logits(model, ids, cache, more)
    return language_logits(model, ids, cache[:-1], {"rope_deltas": cache[-1][0]} | more)
