"""Recurrent layers in passes that rows share with chunks of a prompt.

`route(run, cache)`, once after loading: `run` calls the model on one token with a fresh row cache.
Modules that hold a state in mlx-lm's `ArraysCache` then run part by part where rows that decode
meet tokens of one row. Their call must take hidden states (B, length, hidden) first and the cache
under any name, and return hidden states alone. Without it long prompts run in passes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..upstream import recurrent
from .trial import failure

__all__ = ["route"]


def route(run: Callable[[list[Any]], Any], cache: list[Any]) -> str:
    """See above. Returns what stood in the way; empty: nothing."""

    def tried() -> str:
        recurrent.route(run, cache)
        return ""

    return failure(tried)
