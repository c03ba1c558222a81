"""Attention caches of rows with a shared prefix, which is stored once.

A row, or a merged group of rows, has a shared `Prefix` and its own tail. Models get keys and values
as `Shared`, which only patched attention accepts (`attention.route`). Keys and values are arrays;
if quantised, triples of packed values, scales and biases.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from .cache_classes import BatchKVCache, KVCache, QuantizedKVCache
from .sparse_cache import Skipping

SHAREABLE = (KVCache, QuantizedKVCache)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of the first tokens of several rows, for one layer. Immutable."""

    keys: Any
    """(1, Hk, length, D)"""
    values: Any
    holders: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """Caches of rows, or of merged groups, that use it."""

    @property
    def length(self) -> int:
        return length_of(self.keys)

    def head(self, length: int) -> Prefix:
        if length == self.length:
            return self
        return Prefix(cut(self.keys, 0, length), cut(self.values, 0, length))

    def __deepcopy__(self, memo: Any) -> Prefix:
        return self


@dataclass(frozen=True)
class Shared:
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
        return _each(_concatenated, self.prefix, self.tail)


class Behind:
    """A mixin, before an attention cache in the bases of a class: its tokens follow a prefix."""

    prefix: Prefix

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Shared, Shared]:
        inner: Any = super()
        own = inner.update_and_fetch(keys, values)
        return Shared(self.prefix.keys, own[0]), Shared(self.prefix.values, own[1])


class SharedRow(Behind, Skipping):
    """One row. Its masks cover its own tokens only. `divide` and `start` create it."""


class SharedKV(SharedRow, KVCache):
    """A row with unquantised keys and values."""


class SharedQuantisedKV(SharedRow, QuantizedKVCache):
    """A row with quantised keys and values."""


class SharedBatchKV(Behind, BatchKVCache):
    def __init__(self, prefix: Prefix, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        _hold(self, prefix)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Raises `ValueError` for a window, which would count tokens of the prefix, too."""
        if window_size is not None:
            raise ValueError("attention within a window does not see a shared prefix")
        mask: mx.array = super().make_mask(N, return_array)
        return mask


class Spliced:
    """Keys or values of a row with a shared prefix. A slice copies only its tokens."""

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
    """Move a row's first tokens into a prefix that other rows can use, in place. `room`: capacity
    for the other tokens. The object keeps its identity, because a pass can refer to it. Both parts
    are copies: views would keep the unused capacity allocated as long as the prefix."""
    end, both = layer.offset, (layer.keys, layer.values)
    prefix = Prefix(*[_each(mx.contiguous, cut(each, 0, tokens)) for each in both])
    layer.keys, layer.values = [
        _each(partial(_copy, room=room), cut(each, tokens, end)) for each in both
    ]
    _become_shared(layer, prefix)
    # after each layer, so that only one layer is in memory twice
    mx.eval(prefix.keys, prefix.values, layer.keys, layer.values)
    return prefix


def start(layer: Any, prefix: Prefix) -> None:
    layer.offset = prefix.length
    _become_shared(layer, prefix)


def unite(layer: Any) -> None:
    """Concatenate prefix and tail of a row into one buffer, in place. The tail is not empty."""
    prefix = layer.prefix
    layer.keys = Shared(prefix.keys, layer.keys).whole()
    layer.values = Shared(prefix.values, layer.values).whole()
    prefix.holders.discard(layer)
    del layer.prefix, layer.skipped
    layer.__class__ = KVCache if isinstance(layer, KVCache) else QuantizedKVCache
    mx.eval(layer.keys, layer.values)  # after each layer, as in `divide`


def arrays_of(layer: Any) -> list[Any]:
    both = [(layer.prefix.keys, layer.keys), (layer.prefix.values, layer.values)]
    if layer.keys is None:
        return [array for first, _ in both for array in _arrays(first)]
    return [
        Spliced(*pair)
        for first, own in both
        for pair in zip(_arrays(first), _arrays(own), strict=True)
    ]


def prefix_of(cache: Any) -> Prefix | None:
    found: Prefix | None = getattr(cache, "prefix", None)
    return found


def cut(stored: Any, start: int, stop: int) -> Any:
    return _each(lambda array: array[..., start:stop, :], stored)


def length_of(stored: Any) -> int:
    return int(_arrays(stored)[0].shape[2])


def _become_shared(layer: Any, prefix: Prefix) -> None:
    layer.__class__ = SharedKV if type(layer) is KVCache else SharedQuantisedKV
    layer.skipped = prefix.length
    _hold(layer, prefix)


def _copy(array: mx.array, room: int) -> mx.array:
    """A copy with capacity for `room` tokens, but at least for those of `array`."""
    found = mx.zeros((*array.shape[:2], max(room, array.shape[2]), array.shape[3]), array.dtype)
    found[:, :, : array.shape[2]] = array
    return found


def _hold(cache: Any, prefix: Prefix) -> None:
    cache.prefix = prefix
    prefix.holders.add(cache)


def _arrays(stored: Any) -> list[mx.array]:
    return list(stored) if isinstance(stored, (tuple, list)) else [stored]


def _each(function: Callable[..., mx.array], *stored: Any) -> Any:
    if not isinstance(stored[0], (tuple, list)):
        return function(*stored)
    return tuple(function(*arrays) for arrays in zip(*stored, strict=True))


def _concatenated(prefix: mx.array, tail: mx.array) -> mx.array:
    rows = tail.shape[0]
    return mx.concatenate([mx.broadcast_to(prefix, (rows, *prefix.shape[1:])), tail], axis=2)
