"""mlx-lm's cache classes (mlx_lm/models/cache.py 0.32.2), with additions that models need, and
*sparse* caches: those of rows that lack some of the tokens before their next position.

In mlx-lm, `KVCache.offset` is the number of tokens and also the rotary offset of the next token. In
a sparse cache it is only the rotary offset."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .runtime import keep_file_limit

with keep_file_limit():
    from mlx_lm.models.cache import (
        ArraysCache,
        BatchKVCache,
        BatchRotatingKVCache,
        KVCache,
        QuantizedKVCache,
        RotatingKVCache,
        make_prompt_cache,
    )

__all__ = ["ArraysCache", "BatchKVCache", "BatchRotatingKVCache", "KVCache", "QuantizedKVCache"]
__all__ += ["RotatingKVCache", "make_prompt_cache"]


def layers_of(cache: Sequence[Any]) -> list[Any]:
    """The caches of all layers. Each list of caches (`CacheList`) is replaced by its members."""
    found: list[Any] = []
    for layer in cache:
        inner = getattr(layer, "caches", None)
        found.extend([layer] if inner is None else layers_of(inner))
    return found


def by_layer(make: Callable[..., Any], *layers: Any) -> Any:
    """`make(*layers)`. For lists of caches (`CacheList`), a list made so from their members."""
    if not hasattr(layers[0], "caches"):
        return make(*layers)
    together = type(layers[0])()
    inner = zip(*(layer.caches for layer in layers), strict=True)
    together.caches = tuple(by_layer(make, *layer) for layer in inner)
    return together


class StateCache(ArraysCache):
    """mlx-lm's recurrent cache, plus the two methods that mlx-vlm's hybrid layers call:
    `ArraysCache.update_window` and `update_recurrent` (mlx_vlm/models/cache.py 0.7.10), without
    recording states for speculation."""

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: Any) -> mx.array:
        """Store the last `width` columns of `source`, or in each row `width` from its length on."""
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


def append_kv(cache: Any, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
    """Append to a layer's cache. Returns all its keys and values in order of position. For one
    token, a rotating cache's own method returns the order of its buffer (cache.py 0.32.2)."""
    ring = isinstance(cache, RotatingKVCache)
    append = cache._update_concat if ring else cache.update_and_fetch
    found: tuple[Any, Any] = append(keys, values)
    return found


def take_back(cache: Any, tokens: int) -> None:
    """Remove the last tokens of a row's attention cache, which a call with several tokens appended.
    After such a call, a window holds more tokens than it needs, in order of position
    (`RotatingKVCache._update_concat`, cache.py 0.32.2), and its own `trim` would refuse."""
    if not tokens:
        return
    if not isinstance(cache, RotatingKVCache):
        cache.trim(tokens)
        return
    cache.keys, cache.values = (array[..., :-tokens, :] for array in (cache.keys, cache.values))
    cache.offset -= tokens
    cache._idx -= tokens


class Skipping:
    """A mixin, before one of mlx-lm's attention caches in the bases of a class. `offset`: the
    position of the next token. `skipped`: number of earlier tokens that the cache lacks."""

    offset: int
    skipped: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self.offset -= self.skipped
        inner: Any = super()
        found: tuple[Any, Any] = inner.update_and_fetch(keys, values)
        self.offset += self.skipped
        return found

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Each of the next `N` tokens attends to all that the cache has and to those before it."""
        if window_size is not None:
            raise ValueError("attention within a window finds no tokens that were left out")
        plain = KVCache()
        plain.offset = cached_length(self)
        return plain.make_mask(N, return_array=return_array, window_size=None)

    def size(self) -> int:
        return cached_length(self)

    def trim(self, n: int) -> int:
        """Remove the last `n` tokens, which must have consecutive positions. Returns how many."""
        n = min(cached_length(self), n)
        self.offset -= n
        return n


class SparseKVCache(Skipping, KVCache):
    def __init__(self, skipped: int = 0) -> None:
        super().__init__()
        self.skipped = skipped

    def append_at(
        self, keys: mx.array, values: mx.array, positions: Sequence[int]
    ) -> tuple[Any, Any]:
        """Append tokens. `positions`: theirs, ascending. Returns all keys and values."""
        found = self.update_and_fetch(keys, values)
        self.skipped += positions[-1] + 1 - self.offset
        self.offset = positions[-1] + 1
        return found


def cached_length(cache: Any) -> int:
    """Number of tokens in a row's attention cache."""
    return int(cache.offset) - int(getattr(cache, "skipped", 0))


def can_skip(layer: Any) -> bool:
    """Whether a layer's cache may be in a sparse row. Recurrent states have no positions."""
    return type(layer) is KVCache or isinstance(layer, ArraysCache)


def sparse(cache: Sequence[Any]) -> list[Any]:
    """`cache`, which is empty, with attention layers that can lack tokens. The others are kept."""
    return [by_layer(_sparse, layer) for layer in cache]


def _sparse(layer: Any) -> Any:
    if not isinstance(layer, KVCache):
        return layer
    made = SparseKVCache()
    made.step = layer.step
    return made
