"""A row's attention cache that lacks some of the tokens before its next position.

mlx-lm's cache has one number for the count of tokens and for the rotary offset of the next token
(mlx_lm/models/cache.py 0.32.2, `KVCache.offset`). Here it is only the rotary offset.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from .cache_classes import ArraysCache, KVCache, RotatingKVCache

__all__ = [
    "Skipping",
    "SparseKVCache",
    "SparseWindow",
    "cache_list",
    "held",
    "sparse",
    "unsupported",
    "whole_windows",
    "widest_window",
]


class Skipping:
    """A mixin, before one of mlx-lm's attention caches in the bases of a class.

    `offset`: the position of the next token. `skipped`: number of earlier tokens that are not held.
    """

    offset: int
    skipped: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append tokens at positions from `offset`. Returns all keys and values that are held."""
        self.offset -= self.skipped
        inner: Any = super()
        found: tuple[Any, Any] = inner.update_and_fetch(keys, values)
        self.offset += self.skipped
        return found

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Each of the next `N` tokens attends to all held tokens and is causal. Raises `ValueError`
        for a window, whose tokens depend on positions."""
        if window_size is not None:
            raise ValueError("attention within a window finds no tokens that were left out")
        plain = KVCache()
        plain.offset = held(self)
        return plain.make_mask(N, return_array=return_array, window_size=None)

    def size(self) -> int:
        return held(self)

    def trim(self, n: int) -> int:
        """The last `n` tokens must have consecutive positions."""
        n = min(held(self), n)
        self.offset -= n
        return n


class SparseKVCache(Skipping, KVCache):
    def __init__(self, skipped: int = 0) -> None:
        super().__init__()
        self.skipped = skipped

    def append_at(
        self, keys: mx.array, values: mx.array, positions: Sequence[int]
    ) -> tuple[Any, Any]:
        """`positions`: ascending. Returns all keys and values that are held."""
        found = self.update_and_fetch(keys, values)
        self.skipped += positions[-1] + 1 - self.offset
        self.offset = positions[-1] + 1
        return found

    def mask_at(self, positions: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        return self.make_mask(len(positions), *args, **kwargs)


class SparseWindow(RotatingKVCache):
    """The window of a layer during a sparse prefill: it counts positions, not tokens."""

    keys: mx.array | None
    values: mx.array | None
    offset: int

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.positions: list[int] = []

    def append_at(
        self, keys: mx.array, values: mx.array, positions: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Return the new keys and values, after those in the window of the first."""
        gone = self._gone(positions)
        if self.keys is not None and self.values is not None:
            keys, values = (
                mx.concatenate([old[..., gone:, :], new], axis=2)
                for old, new in ((self.keys, keys), (self.values, values))
            )
        self.keys, self.values = keys, values
        self.positions = [*self.positions[gone:], *positions]
        self.offset, self._idx = positions[-1] + 1, len(self.positions)
        return keys, values

    def mask_at(
        self, positions: Sequence[int], return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """(new tokens, held and new tokens) bool: the tokens in the window of each new token."""
        queries = mx.array(list(positions))[:, None]
        keys = mx.array([*self.positions[self._gone(positions) :], *positions])[None]
        window = min(window_size or self.max_size, self.max_size)
        seen: mx.array = (keys <= queries) & (queries < keys + window)
        return seen

    def _gone(self, positions: Sequence[int]) -> int:
        return bisect_right(self.positions, positions[0] - self.max_size)


def held(cache: Any) -> int:
    return int(cache.offset) - int(getattr(cache, "skipped", 0))


def unsupported(layer: Any) -> bool:
    if type(layer) is RotatingKVCache:
        return bool(layer.keep)
    return type(layer) is not KVCache and not isinstance(layer, ArraysCache)


def widest_window(cache: Sequence[Any]) -> int:
    layers = (layer for each in cache for layer in getattr(each, "caches", [each]))
    return max((each.max_size for each in layers if isinstance(each, SparseWindow)), default=0)


def sparse(cache: Sequence[Any]) -> list[Any]:
    """An empty row whose caches can skip tokens. Recurrent states do not change: they have no
    positions."""
    return [_sparse(layer) for layer in cache]


def whole_windows(cache: Sequence[Any]) -> list[Any]:
    """The row after its prompt, with mlx-lm's own windows, which must hold all their tokens."""
    return [_whole(layer) for layer in cache]


def cache_list(like: Any, caches: Iterable[Any]) -> Any:
    together = type(like)()
    together.caches = tuple(caches)
    return together


def _sparse(layer: Any) -> Any:
    if hasattr(layer, "caches"):
        return cache_list(layer, map(_sparse, layer.caches))
    if isinstance(layer, RotatingKVCache):
        return SparseWindow(layer.max_size)
    if not isinstance(layer, KVCache):
        return layer
    made = SparseKVCache()
    made.step = layer.step
    return made


def _whole(layer: Any) -> Any:
    if hasattr(layer, "caches"):
        return cache_list(layer, map(_whole, layer.caches))
    if not isinstance(layer, SparseWindow):
        return layer
    made = RotatingKVCache(layer.max_size)
    for name in vars(made):
        setattr(made, name, getattr(layer, name))
    return made
