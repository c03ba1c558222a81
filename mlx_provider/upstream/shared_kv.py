"""Attention caches of rows with a shared prefix, which is stored once.

A row, or a merged group of rows, has a shared `Prefix` and its own tail. Models get keys and values
as `Shared`, which only patched attention accepts (`attention.route`). Each part is an array or, if
quantised, a triple of packed values, scales and biases. Attention to the prefix is one product for
all queries of its rows, attention to each tail another. The result is the mean of both, weighted by
the sums of their exponentials: only the rounding differs from attention to the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..records import Parts, parts_of
from .cache_classes import BatchKVCache, KVCache, QuantizedKVCache, Skipping

SHAREABLE = (KVCache, QuantizedKVCache)
"""Classes of rows that `divide` and `start` accept."""


@dataclass(eq=False)
class Prefix:
    """Keys and values of the first tokens of several rows, for one layer. They do not change."""

    keys: Any
    """(1, Hk, length, D)"""
    values: Any

    @property
    def length(self) -> int:
        return _length(self.keys)

    def first_tokens(self, length: int) -> Prefix:
        """A prefix of the first `length` tokens: views."""
        if length == self.length:
            return self
        return Prefix(_cut(self.keys, 0, length), _cut(self.values, 0, length))

    def __deepcopy__(self, memo: Any) -> Prefix:
        return self


@dataclass(frozen=True)
class Shared:
    """Keys, or values, of rows that follow a prefix."""

    prefix: Any
    """(1, Hk, P, D)"""
    tail: Any
    """(B, Hk, S, D)"""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tail: models cut masks to the length of the keys (mlx_vlm/models/base.py
        0.7.10, `kv_sequence_length`)."""
        return _arrays(self.tail)[0].shape

    def whole(self) -> Any:
        """(B, Hk, P + S, D), a copy."""
        return _each(_concatenate, self.prefix, self.tail)


class FollowsPrefix:
    """A mixin, before an attention cache in the bases of a class, whose tokens follow a prefix."""

    prefix: Prefix

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Shared, Shared]:
        inner: Any = super()
        keys, values = inner.update_and_fetch(keys, values)
        return Shared(self.prefix.keys, keys), Shared(self.prefix.values, values)


class SharedRow(FollowsPrefix, Skipping):
    """One row, made by `divide` or `start`. Its offset includes the prefix, its masks do not."""


class SharedKV(SharedRow, KVCache): ...


class SharedQuantisedKV(SharedRow, QuantizedKVCache): ...


class SharedBatchKV(FollowsPrefix, BatchKVCache):
    """Merged rows. `offset`, which the caller sets, includes the prefix; masks do not."""

    def __init__(self, prefix: Prefix, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        self.prefix = prefix

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Raises `ValueError` for a window, which would count tokens of the prefix, too."""
        if window_size is not None:
            raise ValueError("attention within a window does not see a shared prefix")
        mask: mx.array = super().make_mask(N, return_array)
        return mask


class Spliced:
    """Keys or values of a row with a shared prefix, as one array of which only slices are made."""

    def __init__(self, prefix: mx.array, tail: mx.array) -> None:
        self._prefix, self._tail = prefix, tail
        self._at = int(prefix.shape[2])
        self.dtype = prefix.dtype
        self.shape = (*prefix.shape[:2], self._at + tail.shape[2], prefix.shape[3])
        self.nbytes = prefix.nbytes + tail.nbytes

    def __getitem__(self, index: tuple[Any, slice, slice]) -> mx.array:
        start, stop, _ = index[1].indices(self.shape[2])
        head = self._prefix[..., start : min(stop, self._at), :]
        tail = self._tail[..., max(0, start - self._at) : max(0, stop - self._at), :]
        if stop <= self._at:
            return head
        return tail if start >= self._at else mx.concatenate([head, tail], axis=2)


def divide(layer: Any, tokens: int, room: int = 0) -> Prefix:
    """Move the first `tokens` of a row's layer into a prefix that other rows can use, in place:
    the object stays, because a pass can refer to it. `room`: capacity for the other tokens. Both
    parts are copies: views would keep the unused capacity allocated as long as the prefix."""
    end, both = layer.offset, (layer.keys, layer.values)
    prefix = Prefix(*[_each(mx.contiguous, _cut(buffer, 0, tokens)) for buffer in both])
    tail = [_each(partial(_copy, room=room), _cut(buffer, tokens, end)) for buffer in both]
    # layer by layer, so that only one is in memory twice; before the change, as it may fail
    mx.eval(prefix.keys, prefix.values, *tail)
    layer.keys, layer.values = tail
    _become_shared(layer, prefix)
    return prefix


def undivide(layer: Any) -> None:
    """Undo `divide` (not `start`), if it was done. The joined arrays are not evaluated."""
    prefix = prefix_of(layer)
    if prefix is not None:
        layer.keys = _each(_concatenate, prefix.keys, layer.keys)
        layer.values = _each(_concatenate, prefix.values, layer.values)
        layer.__class__ = KVCache if type(layer) is SharedKV else QuantizedKVCache
        del layer.skipped, layer.prefix


def start(layer: Any, prefix: Prefix) -> None:
    """Let the tokens of an empty row follow a prefix, in place."""
    layer.offset = prefix.length
    _become_shared(layer, prefix)


def arrays_of(layer: Any) -> list[Any]:
    """Keys, then values, of a row with its prefix. If it has no tail, arrays; else `Spliced`."""
    prefix = [*_arrays(layer.prefix.keys), *_arrays(layer.prefix.values)]
    if layer.keys is None:
        return prefix
    tail = [*_arrays(layer.keys), *_arrays(layer.values)]
    return [Spliced(*pair) for pair in zip(prefix, tail, strict=True)]


def prefix_of(cache: Any) -> Prefix | None:
    """`None`: the layer's cache follows no prefix."""
    found: Prefix | None = getattr(cache, "prefix", None)
    return found


def _cut(stored: Any, start: int, stop: int) -> Any:
    return _each(lambda array: array[..., start:stop, :], stored)


def _length(stored: Any) -> int:
    return int(_arrays(stored)[0].shape[2])


def _become_shared(layer: Any, prefix: Prefix) -> None:
    layer.__class__ = SharedKV if type(layer) is KVCache else SharedQuantisedKV
    layer.skipped = prefix.length
    layer.prefix = prefix


def _copy(array: mx.array, room: int) -> mx.array:
    """A copy with capacity for `room` tokens, but at least for those of `array`."""
    more = max(0, room - array.shape[2])
    return mx.contiguous(mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]))


def _arrays(stored: Any) -> list[mx.array]:
    return list(stored) if isinstance(stored, (tuple, list)) else [stored]


def _each(function: Callable[..., mx.array], *stored: Any) -> Any:
    if not isinstance(stored[0], (tuple, list)):
        return function(*stored)
    return tuple(function(*arrays) for arrays in zip(*stored, strict=True))


def _concatenate(prefix: mx.array, tail: mx.array) -> mx.array:
    rows = tail.shape[0]
    return mx.concatenate([mx.broadcast_to(prefix, (rows, *prefix.shape[1:])), tail], axis=2)


# ---- attention

FEW = 16
"""Most queries of a row for which prefix and tail are computed separately. The scores of more need
more memory than a copy of one layer's prefix, and the device has kernels that store no scores."""


class Call(NamedTuple):
    queries: mx.array
    """(B, H, L, D)"""
    keys: Any
    values: Any
    mask: Any
    cache: Any

    @property
    def separate(self) -> bool:
        """Whether `attend_separately` computes it."""
        return isinstance(self.keys, Shared) and self.queries.shape[2] <= FEW

    @property
    def whole(self) -> Call:
        """The call with prefix and tail in one array (a copy)."""
        if not isinstance(self.keys, Shared):
            return self
        mask = _widen(self.mask, _length(self.keys.prefix))
        return Call(self.queries, self.keys.whole(), self.values.whole(), mask, self.cache)


def calls_of(queries: mx.array, keys: Any, values: Any, mask: Any, cache: Any) -> list[Call]:
    """The call of each cache, of a call whose keys may be `Parts`."""
    if not isinstance(keys, Parts):
        return [Call(queries, keys, values, mask, cache)]
    return [
        Call(part.select(queries), part.keys, part.values, part.mask, run.cache)
        for part, run in zip(parts_of(keys, values, mask), keys.runs, strict=True)
    ]


def attend_separately(calls: Sequence[Call], scale: float) -> list[mx.array]:
    """Results of calls that are all `separate`. Those with the same prefix share one product."""
    found: dict[int, mx.array] = {}
    for prefix in {id(call.keys.prefix): call.keys.prefix for call in calls}.values():
        same = [i for i, call in enumerate(calls) if call.keys.prefix is prefix]
        found |= zip(same, _attend([calls[i] for i in same], scale), strict=True)
    return [found[i] for i in range(len(calls))]


class Partial(NamedTuple):
    """The attention to a part of the keys, in float32."""

    mean: mx.array
    """(..., queries, D): weighted mean of the values"""
    total: mx.array
    """(..., queries, 1): logarithm of the sum of the weights"""


def _attend(calls: Sequence[Call], scale: float) -> list[mx.array]:
    first, kv_heads = calls[0], _arrays(calls[0].keys.prefix)[0].shape[1]
    # (B, Hk, group, L, D)
    split = [mx.unflatten(call.queries, 1, (kv_heads, -1)) for call in calls]
    # (Hk, B * group * L, D) of each call
    folded = [q.swapaxes(0, 1).reshape(kv_heads, -1, q.shape[-1]) for q in split]
    queries = folded[0] if len(folded) == 1 else mx.concatenate(folded, axis=1)
    prefix = first.keys.prefix, first.values.prefix
    to_prefix = _partial(queries[None], *prefix, scale, None, first.cache)
    found, at = [], 0
    for call, q in zip(calls, split, strict=True):
        rows, _, group, tokens, _ = q.shape
        count, shape = rows * group * tokens, (kv_heads, rows, group, tokens, -1)
        rows_to_prefix = (x[0, :, at : at + count].reshape(shape).swapaxes(0, 1) for x in to_prefix)
        head, tail = Partial(*rows_to_prefix), _attend_tail(call, q, scale)
        weight = mx.sigmoid(head.total - tail.total)
        joined = head.mean * weight + tail.mean * (1 - weight)
        found.append(joined.astype(call.queries.dtype).reshape(rows, -1, tokens, joined.shape[-1]))
        at += count
    return found


def _attend_tail(call: Call, queries: mx.array, scale: float) -> Partial:
    """Queries and results: (B, Hk, group, L, ...)."""
    rows, kv_heads, group, tokens, width = queries.shape
    mask = call.mask
    if mask is not None:
        mask = _by_kv_head(mask, tokens, _length(call.keys.tail), group, kv_heads)
    flat = queries.reshape(rows, kv_heads, group * tokens, width)
    found = _partial(flat, call.keys.tail, call.values.tail, scale, mask, call.cache)
    return Partial(*(x.reshape(rows, kv_heads, group, tokens, -1) for x in found))


def _partial(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, cache: Any
) -> Partial:
    """Attention to `keys` and `values`, with few passes over the scores, which can be large."""
    scores = _product(queries * scale, keys, cache, transpose=True)
    if mask is not None:
        hidden = mx.finfo(scores.dtype).min
        scores = mx.where(mask, scores, hidden) if mask.dtype == mx.bool_ else scores + mask
    weights = mx.softmax(scores, axis=-1, precise=True)
    # softmax: the largest weight is 1 / (sum of the exponentials, relative to the largest)
    top, largest = (x.max(axis=-1, keepdims=True).astype(mx.float32) for x in (scores, weights))
    mean = _product(weights, values, cache, transpose=False)
    return Partial(mean.astype(mx.float32), top - mx.log(largest))


def multiplies_quantised() -> bool:
    """Whether products with quantised keys and values are best without a copy. mlx 0.32.4: CUDA has
    no kernel for them ("No implementation for problem shape"); on a CPU, a copy is ten times as
    fast in bfloat16, and equal in float32."""
    return mx.default_device() == mx.gpu and mx.metal.is_available()


def dequantise(stored: Any, cache: Any) -> mx.array:
    """A copy of quantised keys or values. `cache`: has `group_size` and `bits`."""
    packed, scales, biases = stored
    return mx.dequantize(packed, scales, biases, group_size=cache.group_size, bits=cache.bits)


def _product(x: mx.array, stored: Any, cache: Any, *, transpose: bool) -> mx.array:
    if isinstance(stored, (tuple, list)):
        if multiplies_quantised():
            how = {"group_size": cache.group_size, "bits": cache.bits}
            packed, scales, biases = stored
            return mx.quantized_matmul(x, packed, scales, biases, transpose=transpose, **how)
        stored = dequantise(stored, cache)
    found: mx.array = x @ (stored.swapaxes(-1, -2) if transpose else stored)
    return found


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


def _widen(mask: Any, prefix: int) -> Any:
    """Add columns for a prefix that is visible to all queries."""
    if not isinstance(mask, mx.array):
        return mask
    visible = mx.full((*mask.shape[:-1], prefix), mask.dtype == mx.bool_, mask.dtype)
    return mx.concatenate([visible, mask], axis=-1)
