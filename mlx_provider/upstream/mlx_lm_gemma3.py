"""Gemma 3 without a vision tower, as mlx-lm 0.32.2 has it (models/gemma3_text.py, gemma3.py)."""

from __future__ import annotations

from typing import Any


def set_window(model: Any, window: int) -> None:
    """Let sliding layers see the last `window` tokens; 0: all tokens.

    Masks and caches follow the model's arguments at every call; which rotary base a layer has was
    settled when it was made.
    """
    text = getattr(model, "language_model", model)
    if window:
        text.args.sliding_window = text.model.window_size = window
    else:
        text.args.sliding_window_pattern = text.model.sliding_window_pattern = 1
