"""The operator's sliding window, for both kinds of Gemma 3."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_provider import BadRequest

WINDOW_VARIABLE = "GEMMA3_SLIDING_WINDOW"
"""Tokens that sliding layers see, instead of the checkpoint's number; 0: all. A larger window costs
memory and is not what the model was trained with."""


@dataclass(frozen=True)
class Window:
    tokens: int | None

    @property
    def variant(self) -> str:
        """Distinguishes its KV from that of another window."""
        return "" if self.tokens is None else f":window={self.tokens}"


def chosen_window(environ: Mapping[str, str] = os.environ) -> Window:
    """Raises `BadRequest` for a value that is not a number of tokens."""
    text = environ.get(WINDOW_VARIABLE, "")
    if not text:
        return Window(None)
    if not text.isdigit():
        raise BadRequest(f"{WINDOW_VARIABLE}={text!r} is not a number of tokens")
    return Window(int(text))
