"""Loads any mlx-vlm model, and tests which of its images can be reused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from mlx_provider import LoadOptions
from mlx_provider.families.checkpoint import DEFAULT_CONTEXT, read_json
from mlx_provider.families.tokenizer import load_tokenizer
from mlx_provider.families.vision.loading import load_with_processor
from mlx_provider.families.vision.model import vision_info

from .model import UNKNOWN_PIXELS, AnyVisionModel, image_text
from .proof import problem_of
from .separate import SeparateVisionModel

log = logging.getLogger(__name__)

ESCAPED = (
    "the model's processor tokenises prompts with images by itself: control tokens in the text of "
    "users and tools are written with \\u escapes there"
)
TOGETHER = "a chat with images is prefilled anew at every turn, from its first image on"


def load_any(folder: Path, options: LoadOptions) -> AnyVisionModel:
    """Raises `UnsupportedModel` for models that do not chat."""
    model, processor = load_with_processor(folder, options)
    chat = load_tokenizer(folder, options, getattr(processor, "tokenizer", None))
    token, text = _image_token(folder), getattr(model.config, "text_config", model.config)
    sees = options.modality == "auto"
    info = vision_info(
        folder,
        options,
        model,
        chat,
        media=("image",) if sees else (),
        pixels=(1, UNKNOWN_PIXELS),
        image=image_text(processor, chat, token),
        default_context=int(getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT),
    )
    together = AnyVisionModel(model, processor, info, chat, token)
    separate = SeparateVisionModel(model, processor, info, chat, token)
    problem = problem_of(separate, together) if sees else ""
    if not problem:
        return separate
    together.info = replace(info, notes=(*info.notes, ESCAPED, f"{TOGETHER}: {problem}"))
    return together


def _image_token(folder: Path) -> int | None:
    config = read_json(folder / "config.json")
    names = ("image_token_index", "image_token_id")
    return next((int(config[name]) for name in names if config.get(name) is not None), None)
