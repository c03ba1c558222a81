"""Attention of rows to a shared prefix, as one matrix product for all their queries.

Each row's attention to its own tail is computed separately. The whole is the mean of both, weighted
by the sums of their exponentials; only the rounding differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..records import Parts, parts_of
from .shared_kv import Shared, length_of

FEW = 16
"""Maximum number of queries of a row for which prefix and tail are computed separately: more scores
need more memory than a copy of one layer's prefix, and the device has kernels that do not store
scores."""


class Call(NamedTuple):
    queries: mx.array
    """(B, H, L, D)"""
    keys: Any
    values: Any
    mask: Any
    cache: Any

    @property
    def apart(self) -> bool:
        return isinstance(self.keys, Shared) and self.queries.shape[2] <= FEW

    @property
    def whole(self) -> Call:
        if not isinstance(self.keys, Shared):
            return self
        mask = _widened(self.mask, length_of(self.keys.prefix))
        return Call(self.queries, self.keys.whole(), self.values.whole(), mask, self.cache)


def calls_of(queries: mx.array, keys: Any, values: Any, mask: Any, cache: Any) -> list[Call]:
    if not isinstance(keys, Parts):
        return [Call(queries, keys, values, mask, cache)]
    return [
        Call(part.of(queries), part.keys, part.values, part.mask, run.cache)
        for part, run in zip(parts_of(keys, values, mask), keys.runs, strict=True)
    ]


def attend_apart(calls: Sequence[Call], scale: float) -> list[mx.array]:
    """All calls are `apart`. Those with the same prefix share one product."""
    found: dict[int, mx.array] = {}
    for prefix in {id(call.keys.prefix): call.keys.prefix for call in calls}.values():
        own = [i for i, call in enumerate(calls) if call.keys.prefix is prefix]
        found |= zip(own, _attend([calls[i] for i in own], scale), strict=True)
    return [found[i] for i in range(len(calls))]


class Partial(NamedTuple):
    """The attention to a part of the keys, in float32."""

    mean: mx.array
    """(..., queries, D): weighted mean of the values"""
    total: mx.array
    """(..., queries, 1): logarithm of the sum of the weights"""


def _attend(calls: Sequence[Call], scale: float) -> list[mx.array]:
    first = calls[0]
    kv_heads = _heads(first.keys.prefix)
    split = [_split(call.queries, kv_heads) for call in calls]
    # (Hk, B * group * L, D) of each call
    folded = [q.swapaxes(0, 1).reshape(kv_heads, -1, q.shape[-1]) for q in split]
    queries = folded[0] if len(folded) == 1 else mx.concatenate(folded, axis=1)
    together = attend_prefix(
        queries[None], first.keys.prefix, first.values.prefix, scale, first.cache
    )
    found, at = [], 0
    for call, q in zip(calls, split, strict=True):
        rows, _, group, tokens, _ = q.shape
        count, shape = rows * group * tokens, (kv_heads, rows, group, tokens, -1)
        one = Partial(*(x[0, :, at : at + count].reshape(shape).swapaxes(0, 1) for x in together))
        joined = _joined(one, _own(call, q, scale))
        found.append(joined.astype(call.queries.dtype).reshape(rows, -1, tokens, joined.shape[-1]))
        at += count
    return found


def attend_prefix(
    queries: mx.array, keys: Any, values: Any, scale: float, cache: Any
) -> tuple[mx.array, mx.array]:
    """(1, Hk, M, D). Kernels may replace this function."""
    return _partial(queries, keys, values, scale, None, cache)


def _own(call: Call, queries: mx.array, scale: float) -> Partial:
    """Queries and results: (B, Hk, group, L, ...)."""
    rows, kv_heads, group, tokens, width = queries.shape
    mask = call.mask
    if mask is not None:
        mask = _by_kv_head(mask, tokens, length_of(call.keys.tail), group, kv_heads)
    flat = queries.reshape(rows, kv_heads, group * tokens, width)
    found = _partial(flat, call.keys.tail, call.values.tail, scale, mask, call.cache)
    return Partial(*(x.reshape(rows, kv_heads, group, tokens, -1) for x in found))


def _joined(one: Partial, other: Partial) -> mx.array:
    share = mx.sigmoid(one.total - other.total)
    return one.mean * share + other.mean * (1 - share)


def _partial(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, cache: Any
) -> Partial:
    """Few operations read the scores, which are as large as the keys if there are many rows."""
    scores = _product(queries * scale, keys, cache, transpose=True)
    if mask is not None:
        hidden = mx.finfo(scores.dtype).min
        scores = mx.where(mask, scores, hidden) if mask.dtype == mx.bool_ else scores + mask
    weights = mx.softmax(scores, axis=-1, precise=True)
    # softmax: the largest weight is 1 / (sum of the exponentials, relative to the largest)
    top, largest = (x.max(axis=-1, keepdims=True).astype(mx.float32) for x in (scores, weights))
    mean = _product(weights, values, cache, transpose=False)
    return Partial(mean.astype(mx.float32), top - mx.log(largest))


def _product(x: mx.array, stored: Any, cache: Any, *, transpose: bool) -> mx.array:
    if isinstance(stored, (tuple, list)):
        how = {"group_size": cache.group_size, "bits": cache.bits}
        if mx.default_device() == mx.gpu:
            packed, scales, biases = stored
            return mx.quantized_matmul(x, packed, scales, biases, transpose=transpose, **how)
        # on a CPU, ten times as fast as quantized_matmul in bfloat16, equal in float32 (mlx 0.32.4)
        stored = mx.dequantize(*stored, **how)
    found: mx.array = x @ (stored.swapaxes(-1, -2) if transpose else stored)
    return found


def _heads(stored: Any) -> int:
    array = stored[0] if isinstance(stored, (tuple, list)) else stored
    return int(array.shape[1])


def _split(queries: mx.array, kv_heads: int) -> mx.array:
    """(B, Hk, group, L, D)"""
    rows, heads, tokens, width = queries.shape
    return queries.reshape(rows, kv_heads, heads // kv_heads, tokens, width)


def _by_kv_head(mask: Any, tokens: int, keys: int, group: int, kv_heads: int) -> mx.array:
    """A mask (rows, heads, tokens, keys) for queries ordered (rows, kv heads, group * tokens)."""
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
    """Add columns for a prefix that is visible to all queries."""
    if not isinstance(mask, mx.array):
        return mask
    shape = (*mask.shape[:-1], prefix)
    seen = mx.ones(shape, mask.dtype) if mask.dtype == mx.bool_ else mx.zeros(shape, mask.dtype)
    return mx.concatenate([seen, mask], axis=-1)
