"""A row's attention cache that holds fewer tokens than its position says.

mlx-lm's cache counts both with one number (mlx_lm/models/cache.py 0.32.2, `KVCache.offset`), which
models read as the rotary offset of the next token. Here it is only that offset.
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
    """Before one of mlx-lm's attention caches among the bases of a class.

    `offset`: where the next token stands; `skipped`: tokens before it that are not held.
    """

    offset: int
    skipped: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append tokens from `offset` on. Returns all keys and values that are held."""
        self.offset -= self.skipped
        inner: Any = super()
        found: tuple[Any, Any] = inner.update_and_fetch(keys, values)
        self.offset += self.skipped
        return found

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """What the next `N` tokens may see: all that is held, and what precedes them.

        Raises `ValueError` for a window, within which held tokens would have to be counted by
        their positions.
        """
        if window_size is not None:
            raise ValueError("attention within a window finds no tokens that were left out")
        plain = KVCache()
        plain.offset = held(self)
        return plain.make_mask(N, return_array=return_array, window_size=None)

    def size(self) -> int:
        """Tokens that are held."""
        return held(self)

    def trim(self, n: int) -> int:
        """Take the last tokens back, none of which may stand before one that was left out."""
        n = min(held(self), n)
        self.offset -= n
        return n


class SparseKVCache(Skipping, KVCache):
    """Keys and values as they are."""

    def __init__(self, skipped: int = 0) -> None:
        super().__init__()
        self.skipped = skipped

    def append_at(
        self, keys: mx.array, values: mx.array, positions: Sequence[int]
    ) -> tuple[Any, Any]:
        """Append tokens at ascending positions; keys and values of all that is held."""
        found = self.update_and_fetch(keys, values)
        self.skipped += positions[-1] + 1 - self.offset
        self.offset = positions[-1] + 1
        return found

    def mask_at(self, positions: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """What the next tokens, at these positions, may see."""
        return self.make_mask(len(positions), *args, **kwargs)


class SparseWindow(RotatingKVCache):
    """The window of a layer during a sparse prefill: it counts positions, not tokens."""

    keys: mx.array | None
    values: mx.array | None
    offset: int

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.positions: list[int] = []
        """Of the tokens that are held, ascending."""

    def append_at(
        self, keys: mx.array, values: mx.array, positions: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Append tokens; keys and values of these and of all that the first of them sees."""
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
        """(tokens, held and new tokens) bool: which of them stand within the window of each."""
        queries = mx.array(list(positions))[:, None]
        keys = mx.array([*self.positions[self._gone(positions) :], *positions])[None]
        window = min(window_size or self.max_size, self.max_size)
        seen: mx.array = (keys <= queries) & (queries < keys + window)
        return seen

    def _gone(self, positions: Sequence[int]) -> int:
        """Number of held tokens that none at `positions` sees."""
        return bisect_right(self.positions, positions[0] - self.max_size)


def held(cache: Any) -> int:
    """Tokens that one row's cache of a layer holds."""
    return int(cache.offset) - int(getattr(cache, "skipped", 0))


def unsupported(layer: Any) -> bool:
    """Whether tokens cannot be left out of the cache of a layer (no list of caches)."""
    if type(layer) is RotatingKVCache:
        return bool(layer.keep)
    return type(layer) is not KVCache and not isinstance(layer, ArraysCache)


def widest_window(cache: Sequence[Any]) -> int:
    """Tokens before the next one that some window must hold completely."""
    layers = (layer for each in cache for layer in getattr(each, "caches", [each]))
    return max((each.max_size for each in layers if isinstance(each, SparseWindow)), default=0)


def sparse(cache: Sequence[Any]) -> list[Any]:
    """An empty row, of whose next tokens some may be left out. Recurrent states stay as they are:
    they do not know positions."""
    return [_sparse(layer) for layer in cache]


def whole_windows(cache: Sequence[Any]) -> list[Any]:
    """The row after its prompt, of which every window holds all its tokens: these are plain ones
    again."""
    return [_whole(layer) for layer in cache]


def cache_list(like: Any, caches: Iterable[Any]) -> Any:
    """Another list of caches of the same class (`CacheList`)."""
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
