"""A row cache has one entry per layer. The classes are mlx-lm's, because the engine knows how to
join, cut and store them; `StateCache` is `ArraysCache`, plus methods for mlx-vlm. `append_kv`
appends to a layer's cache and returns all keys and values by position, also of a rotating cache."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from ..isolation import attempt
from ..records import Parts, Run
from ..upstream import recurrent
from ..upstream.cache_classes import (
    KVCache,
    RotatingKVCache,
    StateCache,
    append_kv,
    make_prompt_cache,
)

__all__ = ["KVCache", "PackedRows", "RotatingKVCache", "StateCache", "append_kv", "route"]
__all__ += ["row_cache", "text_cache"]


def text_cache(model: Any) -> list[Any]:
    """An empty row cache for a model of mlx-lm."""
    return list(make_prompt_cache(model))


def row_cache(language_model: Any) -> list[Any]:
    """An empty row cache for a language model of mlx-vlm, with mlx-lm's classes."""
    if not hasattr(language_model, "make_cache"):
        return [KVCache() for _ in language_model.layers]
    return [_as_mlx_lm(entry) for entry in language_model.make_cache()]


def _as_mlx_lm(entry: Any) -> Any:
    kind = type(entry).__name__
    if kind == "KVCache":
        return KVCache()
    if kind == "RotatingKVCache":
        return RotatingKVCache(max_size=entry.max_size, keep=entry.keep)
    return StateCache(len(entry.cache)) if kind == "ArraysCache" else entry


def route(run: Callable[[list[Any]], Any], cache: list[Any]) -> None:
    """Let recurrent layers share a pass with chunks of a prompt: they then run once for the rows
    that decode, and once for the chunk. Call it once after loading; without it, or if `run` fails,
    long prompts run in passes of their own. `run` calls the model on one token with `cache`, a
    fresh row cache, to find modules with a state in mlx-lm's `ArraysCache`. These must take hidden
    states (B, length, hidden) first, the cache under any name, and return only hidden states."""
    attempt(lambda: recurrent.route(run, cache))


class PackedRows:
    """One layer's caches of several rows, to which a call adds `counts` tokens each. To the model,
    each token is a row of one token. Only attention, which `families.layers` must have patched,
    computes row by row."""

    def __init__(self, caches: Sequence[Any], counts: Sequence[int], offset: mx.array) -> None:
        """`offset`: positions of all tokens, (tokens,) int32."""
        self.offset = offset
        edges = pairwise(accumulate(counts, initial=0))
        self._runs = [
            Run(cache, slice(*edge), turned=True) for cache, edge in zip(caches, edges, strict=True)
        ]

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> list[Any]:
        """One mask per row. `N`: tokens per row for the model, always 1."""
        counted = [(run.cache, run.rows.stop - run.rows.start) for run in self._runs]
        return [cache.make_mask(count, *args, **kwargs) for cache, count in counted]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Append (tokens, heads, 1, D): to each row its tokens, as (1, heads, tokens, D)."""
        pairs = [
            run.cache.update_and_fetch(*(x[run.rows].swapaxes(0, 2) for x in (keys, values)))
            for run in self._runs
        ]
        all_keys, all_values = (list(arrays) for arrays in zip(*pairs, strict=True))
        return Parts(all_keys, self._runs), Parts(all_values, self._runs)
