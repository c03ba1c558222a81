"""mlx-lm's cache classes (mlx_lm/models/cache.py 0.32.2), with additions that models need."""

from __future__ import annotations

from collections.abc import Callable
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
    "StateCache",
    "StateHistory",
    "appended",
    "make_prompt_cache",
    "take_back",
]


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


class StateHistory(StateCache):
    """A row's recurrent cache that records the states after each token of one call. Upstream:
    `record_speculative_window` and `record_speculative_states`, mlx_vlm/models/cache.py 0.7.10."""

    def __init__(self, cache: ArraysCache) -> None:
        super().__init__(len(cache.cache))
        self.cache = list(cache.cache)
        self._windows: dict[int, tuple[mx.array, int]] = {}
        self._earlier: dict[int, mx.array] = {}
        """(1, tokens - 1, ...): states after each token except the last one."""

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: Any) -> mx.array:
        self._windows[index] = source, width
        return super().update_window(index, source, width, lengths=lengths)

    def update_recurrent(
        self, index: int, length: int, update: Callable[[Any, Any], tuple[Any, ...]]
    ) -> tuple[Any, Any]:
        output, state, self._earlier[index] = update(self.cache[index], length - 1)
        self.cache[index] = state
        return output, state

    def after(self, tokens: int) -> list[Any]:
        found = list(self.cache)
        for index, (source, width) in self._windows.items():
            found[index] = mx.contiguous(source[:, tokens : tokens + width])
        for index, earlier in self._earlier.items():
            if tokens <= earlier.shape[1]:
                found[index] = mx.contiguous(earlier[:, tokens - 1])
        return found


def appended(cache: Any, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
    """Append to a layer's cache. Returns all its keys and values in order of position; for one
    token, a rotating cache itself returns buffer order (cache.py 0.32.2,
    `RotatingKVCache._update_in_place`)."""
    if isinstance(cache, RotatingKVCache):
        ring: tuple[Any, Any] = cache._update_concat(keys, values)
        return ring
    found: tuple[Any, Any] = cache.update_and_fetch(keys, values)
    return found


def take_back(cache: Any, tokens: int) -> None:
    """Remove the last tokens of a row's attention cache, appended by a call with several tokens.

    After such a call, a window holds more tokens than it needs, in order of position
    (mlx_lm/models/cache.py 0.32.2, `RotatingKVCache._update_concat`), so none is missing. Its own
    `trim` would refuse.
    """
    if not tokens:
        return
    if not isinstance(cache, RotatingKVCache):
        cache.trim(tokens)
        return
    cache.keys, cache.values = (each[..., :-tokens, :] for each in (cache.keys, cache.values))
    cache.offset -= tokens
    cache._idx -= tokens
