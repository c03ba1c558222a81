"""Recurrent layers in passes that rows share with chunks of a prompt.

`route(run, cache)`, once after loading: `run` calls the model on one token with a fresh row cache.
Modules with a state in mlx-lm's `ArraysCache` then run part by part if decoding rows share a pass
with several tokens of one row. Their call must take hidden states (B, length, hidden) first and the
cache under any name, and return only hidden states. Without `route`, long prompts run in separate
passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..upstream import recurrent
from .trial import failure

__all__ = ["route"]


def route(run: Callable[[list[Any]], Any], cache: list[Any]) -> str:
    """Return the reason of a failure. Empty: success."""

    def tried() -> str:
        recurrent.route(run, cache)
        return ""

    return failure(tried)
