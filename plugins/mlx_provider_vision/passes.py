"""Prefill and decode by the calls that every mlx-vlm model has: `prefill` and `decode` for models
that embed a whole prompt with its images (`model.py`), `prefill_separately` and `decode_separately`
for those that can embed one image (`separate.py`). What a model returns with its embeddings goes to
its language model, which takes the part at the cache's offset. M-RoPE models get rotary positions.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_provider import MediaSpan, PrefillChunk
from mlx_provider.families.caches import StateCache, row_cache
from mlx_provider.families.vision.loading import embed, has_mrope, language_logits
from mlx_provider.families.vision.model import embeddings, pieces
from mlx_provider.families.vision.patches import chunk_positions, step_positions


def make_cache(model: Any) -> list[Any]:
    """An empty row cache for `prefill`. M-RoPE models have a last entry with the rotary delta."""
    entries = row_cache(model.language_model)
    return [*entries, StateCache(1)] if has_mrope(model) else entries


def prefill(model: Any, chunk: PrefillChunk) -> mx.array:
    """Append a chunk. Tokens from the first image to the last run in one pass once a chunk reaches
    them, so the cache may be ahead of the chunk. Returns logits (vocab,) after the last token that
    runs, or zeros (1,) if the cache has the whole chunk already."""
    logits = mx.zeros(1)
    for span in chunk.prompt.spans:
        if _count_held(chunk) < min(span.start, chunk.stop):
            logits = _text(model, chunk, min(span.start, chunk.stop))
        if span.start < chunk.stop and _count_held(chunk) < span.end:
            # the prompt's last token stays for the pass that gives logits
            end = min(span.end, max(chunk.stop, len(chunk.prompt.tokens) - 1))
            logits = _media(model, chunk, span, end)
    return _text(model, chunk, chunk.stop) if _count_held(chunk) < chunk.stop else logits


def prefill_separately(model: Any, chunk: PrefillChunk) -> mx.array:
    """Append a chunk whose text and images are embedded apart. Returns logits (vocab,) after its
    last token. The cache is one of `row_cache`. M-RoPE models take the prompt's positions."""
    parts = pieces(chunk)
    ids = mx.array(np.asarray(chunk.prompt.tokens[chunk.start : chunk.stop], np.int32))[None]
    more: dict[str, Any] = {}
    if any(part.features is not None for part in parts):

        def embed_text(ids: mx.array) -> mx.array:
            """(length,) -> (length, hidden)."""
            rows: mx.array = embed(model, {"input_ids": ids[None]})["inputs_embeds"][0]
            return rows

        more["inputs_embeds"] = embeddings(chunk, parts, embed_text)
        more["n_to_process"] = chunk.stop - chunk.start  # mlx-vlm's name for their number
    if has_mrope(model):
        more |= {"position_ids": chunk_positions(chunk), "rope_deltas": mx.zeros((1, 1), mx.int32)}
    return language_logits(model, ids, chunk.cache, more)[0, -1]


def decode_separately(
    model: Any, tokens: mx.array, cache: list[Any], positions: mx.array
) -> mx.array:
    """Like `decode`, but `positions` (B,) are rotary ones, and the cache has no rotary delta."""
    more = {}
    if has_mrope(model):
        more["position_ids"] = step_positions(positions)
        more["rope_deltas"] = mx.zeros((positions.size, 1), mx.int32)
    return language_logits(model, tokens[:, None], cache, more)[:, -1]


def _count_held(chunk: PrefillChunk) -> int:
    """Tokens in the row's cache; those before the chunk if no entry of the cache knows."""
    offsets = [int(entry.offset) for entry in chunk.cache if hasattr(entry, "offset")]
    return max(offsets, default=chunk.start)


def _text(model: Any, chunk: PrefillChunk, stop: int) -> mx.array:
    """Append text up to position `stop` of the prompt. Returns logits (vocab,)."""
    tokens = np.asarray(chunk.prompt.tokens[_count_held(chunk) : stop], np.int32)
    return _step(model, mx.array(tokens)[None], chunk.cache)


def _media(model: Any, chunk: PrefillChunk, span: MediaSpan, end: int) -> mx.array:
    """Append tokens up to position `end` with the features of `span`, whose arrays are as long as
    the prompt. Returns logits (vocab,)."""
    start = _count_held(chunk)
    more = dict(chunk.features[span.content_hash].arrays)
    prompt_rows = more.pop("inputs_embeds")
    if "position_ids" in more:
        more["position_ids"] = more["position_ids"][..., start:end]
    if has_mrope(model):
        chunk.cache[-1][0] = more.get("rope_deltas", mx.zeros((1, 1), mx.int32))
    ids = mx.array(np.asarray(chunk.prompt.tokens[start:end], np.int32))[None]
    # a slice, because some models scale the given embeddings in place
    rows = prompt_rows[:, start:end]
    return _step(model, ids, chunk.cache, inputs_embeds=rows, n_to_process=end - start, **more)


def decode(model: Any, tokens: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
    """One token of every row. `tokens`: (B,). `positions`: (B,), tokens in the cache of each row.
    Returns logits (B, vocab)."""
    more = {}
    if has_mrope(model):
        more["position_ids"] = step_positions(positions + cache[-1][0].reshape(-1))
    return _logits(model, tokens[:, None], cache, **more)[:, -1]


def _step(model: Any, ids: mx.array, cache: list[Any], **more: Any) -> mx.array:
    """Append the tokens `ids`, (1, length), of one row. Returns logits (vocab,) after the last."""
    if has_mrope(model) and cache[-1][0] is None:
        cache[-1][0] = mx.zeros((1, 1), mx.int32)
    return _logits(model, ids, cache, **more)[0, -1]


def _logits(model: Any, ids: mx.array, cache: list[Any], **more: Any) -> mx.array:
    """Logits (B, length, vocab). The last entry of an M-RoPE model's cache is the rotary delta."""
    if not has_mrope(model):
        return language_logits(model, ids, cache, more)
    return language_logits(model, ids, cache[:-1], {"rope_deltas": cache[-1][0]} | more)
