"""Caches of one row: one entry per layer, in mlx-lm's classes, by which the engine joins, cuts and
stores rows.

`route(run, cache)`, once after loading, lets recurrent layers share a pass with chunks of a prompt:
`run` calls the model on one token with a fresh row cache. Modules with a state in mlx-lm's
`ArraysCache` then run part by part if decoding rows share a pass with several tokens of one row.
Their call must take hidden states (B, length, hidden) first and the cache under any name, and
return only hidden states. Without `route`, long prompts run in separate passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..upstream import recurrent
from ..upstream.cache_classes import (
    KVCache,
    RotatingKVCache,
    StateCache,
    appended,
    make_prompt_cache,
)
from .logits import failure

__all__ = [
    "KVCache",
    "RotatingKVCache",
    "StateCache",
    "appended",
    "route",
    "row_cache",
    "text_cache",
]


def text_cache(model: Any) -> list[Any]:
    return list(make_prompt_cache(model))


def row_cache(language_model: Any) -> list[Any]:
    if not hasattr(language_model, "make_cache"):
        return [KVCache() for _ in language_model.layers]
    return [_lm_class(entry) for entry in language_model.make_cache()]


def _lm_class(entry: Any) -> Any:
    kind = type(entry).__name__
    if kind == "KVCache":
        return KVCache()
    if kind == "RotatingKVCache":
        return RotatingKVCache(max_size=entry.max_size, keep=entry.keep)
    if kind == "ArraysCache":
        return StateCache(len(entry.cache))
    return entry


def route(run: Callable[[list[Any]], Any], cache: list[Any]) -> str:
    """Return the reason of a failure. Empty: success."""

    def attempt() -> str:
        recurrent.route(run, cache)
        return ""

    return failure(attempt)
