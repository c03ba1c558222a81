"""Attention of rows to a prefix that they share, in one product of all their queries.

Each row attends to its own tail apart. The two are joined by the sums of their weights, which is
exact but for rounding: softmax over all keys is the mean of both, weighted by these sums.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..records import Function
from .shared_kv import Shared

FEW = 16
"""Most queries of a row that attend to its two parts apart. For more, the scores would take more
memory than a copy of one layer's prefix, and the device has kernels that keep no scores."""


def attend_shared(
    original: Function,
    queries: mx.array,
    keys: Shared,
    values: Shared,
    cache: Any,
    named: dict[str, Any],
    mask: Any,
) -> mx.array:
    """Attention of rows to their prefix and their tails. `mask`: that of the tails."""
    rows, heads, tokens, _ = queries.shape
    if tokens > FEW or named.get("sinks") is not None:
        whole = keys.whole(), values.whole()
        wide = _widened(mask, keys.prefix.shape[2])
        found: mx.array = original(queries, *whole, cache, **named, mask=wide)
        return found
    kv_heads, scale = keys.tail.shape[1], named["scale"]
    split = queries.reshape(rows, kv_heads, heads // kv_heads, tokens, -1)
    folded = split.swapaxes(0, 1).reshape(1, kv_heads, rows * (heads // kv_heads) * tokens, -1)
    shape = (kv_heads, rows, heads // kv_heads, tokens, -1)
    one = [
        each.reshape(shape).swapaxes(0, 1)
        for each in _partial(folded, keys.prefix, values.prefix, scale, None)
    ]
    own = split.reshape(rows, kv_heads, -1, split.shape[-1])
    if mask is not None:
        mask = _by_kv_head(mask, tokens, keys.tail.shape[2], heads // kv_heads, kv_heads)
    shape = (rows, kv_heads, heads // kv_heads, tokens, -1)
    other = [each.reshape(shape) for each in _partial(own, keys.tail, values.tail, scale, mask)]
    top = mx.maximum(one[1], other[1])
    shares = mx.exp(one[1] - top), mx.exp(other[1] - top)
    total = one[2] * shares[0] + other[2] * shares[1]
    joined = (one[0] * shares[0] + other[0] * shares[1]) / total
    return joined.astype(queries.dtype).reshape(rows, heads, tokens, -1)


def _partial(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> tuple[mx.array, mx.array, mx.array]:
    """Unnormalised attention, the largest score and the sum of the weights, as float32."""
    scores = (queries @ keys.swapaxes(-1, -2)).astype(mx.float32) * scale
    if mask is not None:
        hidden = mx.finfo(mx.float32).min
        scores = mx.where(mask, scores, hidden) if mask.dtype == mx.bool_ else scores + mask
    top = scores.max(axis=-1, keepdims=True)
    weights = mx.exp(scores - top)
    found = (weights.astype(values.dtype) @ values).astype(mx.float32)
    return found, top, weights.sum(axis=-1, keepdims=True)


def _by_kv_head(mask: Any, tokens: int, keys: int, group: int, kv_heads: int) -> mx.array:
    """A mask of (rows, heads, tokens, keys) for queries in the order (rows, kv heads, group *
    tokens)."""
    if isinstance(mask, str):
        mask = mx.arange(keys) <= mx.arange(keys - tokens, keys)[:, None]
    while mask.ndim < 4:
        mask = mask[None]
    rows, heads = mask.shape[:2]
    mask = mx.broadcast_to(mask, (rows, heads, tokens, keys))
    if heads == 1:
        mask = mx.broadcast_to(mask[:, :, None], (rows, 1, group, tokens, keys))
    found: mx.array = mask.reshape(rows, min(heads, kv_heads), group * tokens, keys)
    return found


def _widened(mask: Any, prefix: int) -> Any:
    """A mask with columns for a prefix that every query sees."""
    if not isinstance(mask, mx.array):
        return mask
    shape = (*mask.shape[:-1], prefix)
    seen = mx.ones(shape, mask.dtype) if mask.dtype == mx.bool_ else mx.zeros(shape, mask.dtype)
    return mx.concatenate([seen, mask], axis=-1)
