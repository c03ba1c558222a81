"""A row's attention cache that holds fewer tokens than its position tells.

mlx-lm's cache counts both with one number (mlx_lm/models/cache.py 0.32.2, `KVCache.offset`), which
models read as the rotary offset of what comes next. Here that is all it is.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .cache_classes import KVCache

__all__ = ["Skipping", "SparseKVCache", "held", "sparse"]


class Skipping:
    """Before one of mlx-lm's attention caches among the bases of a class.

    `offset`: where the next token stands; `skipped`: tokens before it that are not held.
    """

    offset: int
    skipped: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append what stands from `offset` on; keys and values of all that is held."""
        self.offset -= self.skipped
        inner: Any = super()
        found: tuple[Any, Any] = inner.update_and_fetch(keys, values)
        self.offset += self.skipped
        return found

    def reach(self, offset: int) -> None:
        """What was appended last stood before this, and not where it was expected."""
        self.skipped += offset - self.offset
        self.offset = offset

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


def held(cache: Any) -> int:
    """Tokens that one row's cache of a layer holds."""
    return int(cache.offset) - int(getattr(cache, "skipped", 0))


def sparse(cache: list[Any]) -> list[Any]:
    """The same row, of whose next tokens some may be left out; its arrays are shared.

    Raises `TypeError` for layers that keep anything but all tokens as they are.
    """
    return [_sparse(layer) for layer in cache]


def _sparse(layer: Any) -> SparseKVCache:
    if type(layer) not in (KVCache, SparseKVCache):
        raise TypeError(f"{type(layer).__name__} is no plain KV cache")
    made = SparseKVCache()
    for name, value in vars(layer).items():
        setattr(made, name, value)
    return made
