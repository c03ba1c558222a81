"""mlx-lm's cache classes (mlx_lm/models/cache.py 0.32.2), with additions that models need, and the
caches of rows that lack some of the tokens before their next position.

mlx-lm has one number for the count of tokens and for the rotary offset of the next token
(`KVCache.offset`). In a sparse cache it is only the rotary offset.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .runtime import file_limit_kept

with file_limit_kept():
    from mlx_lm.models.cache import (
        ArraysCache,
        BatchKVCache,
        BatchRotatingKVCache,
        KVCache,
        QuantizedKVCache,
        RotatingKVCache,
        make_prompt_cache,
    )

__all__ = [
    "ArraysCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "KVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "make_prompt_cache",
]


def leaves(cache: Sequence[Any]) -> list[Any]:
    """Opens lists of caches (`CacheList`)."""
    found: list[Any] = []
    for layer in cache:
        inner = getattr(layer, "caches", None)
        found.extend([layer] if inner is None else leaves(inner))
    return found


def by_leaf(make: Callable[..., Any], *layers: Any) -> Any:
    """`make(*layers)`, or a list of caches (`CacheList`) made so from those in `layers`."""
    if not hasattr(layers[0], "caches"):
        return make(*layers)
    together = type(layers[0])()
    inner = zip(*(layer.caches for layer in layers), strict=True)
    together.caches = tuple(by_leaf(make, *each) for each in inner)
    return together


class StateCache(ArraysCache):
    """mlx-lm's recurrent cache, plus the two methods that mlx-vlm's hybrid layers call:
    `ArraysCache.update_window` and `update_recurrent` (mlx_vlm/models/cache.py 0.7.10), without
    recording states for speculation."""

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: Any) -> mx.array:
        """Store the last `width` columns of `source`, or those before the length of each row."""
        span = source.shape[1] - width
        if lengths is None:
            state = mx.contiguous(source[:, span:])
        else:
            columns = mx.clip(lengths, 0, span)[:, None] + mx.arange(width)
            columns = columns.reshape(*columns.shape, *([1] * (source.ndim - 2)))
            state = mx.take_along_axis(source, columns, axis=1)
        self.cache[index] = state
        return state

    def update_recurrent(
        self, index: int, length: int, update: Callable[[Any, Any], tuple[Any, ...]]
    ) -> tuple[Any, Any]:
        output, state = update(self.cache[index], None)[:2]
        self.cache[index] = state
        return output, state


def appended(cache: Any, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
    """Append to a layer's cache. Returns all its keys and values in order of position; for one
    token, a rotating cache itself returns buffer order (`_update_in_place`, cache.py 0.32.2)."""
    ring = isinstance(cache, RotatingKVCache)
    append: Callable[..., tuple[Any, Any]] = (
        cache._update_concat if ring else cache.update_and_fetch
    )
    return append(keys, values)


def take_back(cache: Any, tokens: int) -> None:
    """Remove the last tokens of a row's attention cache, appended by a call with several tokens.
    After that, a window holds more tokens than it needs, in order of position
    (`RotatingKVCache._update_concat`, cache.py 0.32.2). Its own `trim` would refuse."""
    if not tokens:
        return
    if not isinstance(cache, RotatingKVCache):
        cache.trim(tokens)
        return
    cache.keys, cache.values = (each[..., :-tokens, :] for each in (cache.keys, cache.values))
    cache.offset -= tokens
    cache._idx -= tokens


class Skipping:
    """A mixin, before one of mlx-lm's attention caches in the bases of a class. `offset`: the
    position of the next token. `skipped`: number of earlier tokens that are not held."""

    offset: int
    skipped: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self.offset -= self.skipped
        inner: Any = super()
        found: tuple[Any, Any] = inner.update_and_fetch(keys, values)
        self.offset += self.skipped
        return found

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Each of the next `N` tokens attends to all held tokens and is causal."""
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
        """`positions`: ascending."""
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
        gone = self._count_gone(positions)
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
        keys = mx.array([*self.positions[self._count_gone(positions) :], *positions])[None]
        window = min(window_size or self.max_size, self.max_size)
        seen: mx.array = (keys <= queries) & (queries < keys + window)
        return seen

    def _count_gone(self, positions: Sequence[int]) -> int:
        return bisect_right(self.positions, positions[0] - self.max_size)


def held(cache: Any) -> int:
    return int(cache.offset) - int(getattr(cache, "skipped", 0))


def unsupported(layer: Any) -> bool:
    if type(layer) is RotatingKVCache:
        return bool(layer.keep)
    return type(layer) is not KVCache and not isinstance(layer, ArraysCache)


def widest_window(cache: Sequence[Any]) -> int:
    windows = (each.max_size for each in leaves(cache) if isinstance(each, SparseWindow))
    return max(windows, default=0)


def sparse(cache: Sequence[Any]) -> list[Any]:
    """An empty row whose caches can skip tokens. Recurrent states do not change: they have no
    positions."""
    return [by_leaf(_sparse, layer) for layer in cache]


def whole_windows(cache: Sequence[Any]) -> list[Any]:
    """The row after its prompt, with mlx-lm's own windows."""
    return [by_leaf(_whole, layer) for layer in cache]


def _sparse(layer: Any) -> Any:
    if isinstance(layer, RotatingKVCache):
        return SparseWindow(layer.max_size)
    if not isinstance(layer, KVCache):
        return layer
    made = SparseKVCache()
    made.step = layer.step
    return made


def _whole(layer: Any) -> Any:
    if not isinstance(layer, SparseWindow):
        return layer
    made = RotatingKVCache(layer.max_size)
    for name in vars(made):
        setattr(made, name, getattr(layer, name))
    return made
