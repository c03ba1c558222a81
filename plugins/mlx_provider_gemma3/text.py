"""One loaded Gemma 3 model without a vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_provider import LoadOptions
from mlx_provider.upstream.mlx_lm_gemma3 import set_window
from mlx_provider.upstream.mlx_lm_model import TextModel, load_text

from .window import chosen_window


def load_gemma_text(folder: Path, options: LoadOptions) -> TextModel:
    """Load a checkpoint. Raises `BadRequest` for a window that is no number."""
    window = chosen_window()

    def change(model: Any) -> None:
        if window.tokens is not None:
            set_window(model, window.tokens)

    return load_text(folder, options, change=change, variant=window.variant)
