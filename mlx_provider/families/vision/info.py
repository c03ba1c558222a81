"""`ModelInfo` of a model with a vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...records import LoadOptions, ModelInfo
from ..checkpoint import DEFAULT_CONTEXT, context_length, read_json
from ..info import describe, precision
from ..tokenizer import HFTokenizer
from ..tokenizer.dialect import refuses_late_system, shows_tool_media
from .language import vocab_size


def vision_info(
    folder: Path,
    options: LoadOptions,
    model: Any,
    tokenizer: HFTokenizer,
    *,
    media: tuple[str, ...],
    pixels: tuple[int, int],
    image: str,
    variant: str = "",
    default_context: int = DEFAULT_CONTEXT,
) -> ModelInfo:
    """`image`: the template's text for an image; `variant`: changes of the KV that the files do not
    show; `default_context`: the context length if config and operator give none."""
    config = read_json(folder / "config.json")
    text = config.get("text_config") or config
    # `n_ctx` is the last name in the search
    context = context_length({"n_ctx": default_context, **text}, options)
    return describe(
        folder,
        config,
        model,
        tokenizer,
        options,
        vocab_size=vocab_size(model.language_model),
        precision=precision(model.language_model),
        media=frozenset(media),
        min_pixels=pixels[0] if media else 0,
        max_pixels=pixels[1] if media else 0,
        hoist_system=refuses_late_system(tokenizer),
        tool_media="image" in media and shows_tool_media(tokenizer, image),
        context_length=context,
        variant=variant,
    )
