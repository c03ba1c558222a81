"""Attention caches of rows with a common prefix, which is in memory once.

A row, or a merged group of rows, holds a `Prefix` that others hold too, and its own tail. Models
see keys and values as `Shared`, which only a routed attention understands (`attention.route`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from .cache_classes import BatchKVCache, KVCache
from .sparse_cache import SparseKVCache


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of the first tokens of several rows, for one layer. Immutable."""

    keys: mx.array
    """(1, Hk, length, D)"""
    values: mx.array

    @property
    def length(self) -> int:
        return int(self.keys.shape[2])

    def head(self, length: int) -> Prefix:
        """The first tokens of it, as views."""
        if length == self.length:
            return self
        return Prefix(self.keys[..., :length, :], self.values[..., :length, :])

    def __deepcopy__(self, memo: Any) -> Prefix:
        return self


class Shared(NamedTuple):
    """Keys or values of rows with a common prefix."""

    prefix: mx.array
    """(1, Hk, P, D)"""
    tail: mx.array
    """(B, Hk, S, D)"""

    def whole(self) -> mx.array:
        """(B, Hk, P + S, D), a copy."""
        rows = self.tail.shape[0]
        prefix = mx.broadcast_to(self.prefix, (rows, *self.prefix.shape[1:]))
        return mx.concatenate([prefix, self.tail], axis=2)


class SharedKV(SparseKVCache):
    """One row: only the tokens after the prefix are its own. Masks are those of its own tokens."""

    prefix: Prefix

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return _shared(self.prefix, super().update_and_fetch(keys, values))


class SharedBatchKV(BatchKVCache):
    """Several rows with one prefix."""

    def __init__(self, prefix: Prefix, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        self.prefix = prefix

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return _shared(self.prefix, super().update_and_fetch(keys, values))

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Raises `ValueError` for a window, which would count tokens of the prefix, too."""
        if window_size is not None:
            raise ValueError("attention within a window does not see a shared prefix")
        mask: mx.array = super().make_mask(N, return_array)
        return mask


class Spliced:
    """Keys or values of a row with a shared prefix, to be cut: only what is cut is copied."""

    def __init__(self, prefix: mx.array, tail: mx.array) -> None:
        self._prefix, self._tail = prefix, tail
        self._at = int(prefix.shape[2])
        self.dtype = prefix.dtype
        self.shape = (*prefix.shape[:2], self._at + tail.shape[2], prefix.shape[3])
        self.nbytes = prefix.nbytes + tail.nbytes

    def __getitem__(self, index: tuple[Any, slice, slice]) -> mx.array:
        """`[..., start:stop, :]`"""
        start, stop, _ = index[1].indices(self.shape[2])
        head = self._prefix[..., start : min(stop, self._at), :]
        tail = self._tail[..., max(0, start - self._at) : max(0, stop - self._at), :]
        if stop <= self._at:
            return head
        return tail if start >= self._at else mx.concatenate([head, tail], axis=2)


def divide(layer: KVCache, tokens: int) -> Prefix:
    """Make a row's first tokens a prefix that others can hold, in place.

    The object stays the same, because a pass may refer to it. Both parts are copies: otherwise
    the capacity behind the row's tokens would stay allocated as long as the prefix, unaccounted.
    """
    end, both = layer.offset, (layer.keys, layer.values)
    first = [mx.contiguous(each[..., :tokens, :]) for each in both]
    layer.keys, layer.values = [mx.contiguous(each[..., tokens:end, :]) for each in both]
    prefix = Prefix(*first)
    _become_shared(layer, prefix)
    mx.eval(first, layer.keys, layer.values)  # layer by layer, so that only one is held twice
    return prefix


def start(layer: KVCache, prefix: Prefix) -> None:
    """Put a fresh row behind a prefix, in place."""
    layer.offset = prefix.length
    _become_shared(layer, prefix)


def arrays_of(layer: SharedKV) -> list[Any]:
    """Keys and values of all tokens of a row."""
    prefix = layer.prefix
    if layer.keys is None:
        return [prefix.keys, prefix.values]
    return [Spliced(prefix.keys, layer.keys), Spliced(prefix.values, layer.values)]


def prefix_of(cache: Any) -> Prefix | None:
    """The prefix of a layer's cache, if it is shared."""
    found: Prefix | None = getattr(cache, "prefix", None)
    return found


def _become_shared(layer: KVCache, prefix: Prefix) -> None:
    layer.__class__ = SharedKV
    layer.prefix, layer.skipped = prefix, prefix.length


def _shared(prefix: Prefix, own: tuple[mx.array, mx.array]) -> tuple[Shared, Shared]:
    return Shared(prefix.keys, own[0]), Shared(prefix.values, own[1])
