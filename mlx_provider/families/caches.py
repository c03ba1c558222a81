"""Caches of one row: one entry per layer, in mlx-lm's classes, by which the engine joins, cuts and
stores rows."""

from __future__ import annotations

from typing import Any

from ..upstream.cache_classes import (
    KVCache,
    RotatingKVCache,
    StateCache,
    append_behind,
    appended,
    make_prompt_cache,
    visible,
    visible_behind,
)

__all__ = [
    "KVCache",
    "RotatingKVCache",
    "StateCache",
    "append_behind",
    "appended",
    "row_cache",
    "text_cache",
    "visible",
    "visible_behind",
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
