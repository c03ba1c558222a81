"""One loaded Gemma 3 model without a vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_provider import LoadOptions
from mlx_provider.families.text import TextModel, load_text

from .window import chosen_window


def load_gemma_text(folder: Path, options: LoadOptions) -> TextModel:
    """Raises `BadRequest` for a window that is not a number."""
    window = chosen_window()

    def change(model: Any) -> None:
        if window.tokens is not None:
            set_window(model, window.tokens)

    return load_text(folder, options, change=change, variant=window.variant)


def set_window(model: Any, window: int) -> None:
    """Sliding layers see the last `window` tokens; 0: all tokens. Masks and caches follow the
    model's arguments at every call (models/gemma3_text.py and gemma3.py of mlx-lm 0.32.2)."""
    text = getattr(model, "language_model", model)
    if window:
        text.args.sliding_window = text.model.window_size = window
    else:
        text.args.sliding_window_pattern = text.model.sliding_window_pattern = 1
