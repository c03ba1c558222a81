"""Loads any mlx-vlm model, and checks whether its images can be embedded separately, so that any
prompt can reuse the features of an image.

The check computes a prompt with two images twice: whole, as mlx-vlm does it, and with separate
images and a chunk that ends inside an image. Tokens, features and logits must agree."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_provider import LoadedModel, LoadOptions, MediaItem, PrefillChunk, Prompt
from mlx_provider.families.caches import route
from mlx_provider.families.checkpoint import DEFAULT_CONTEXT, read_json
from mlx_provider.families.logits import failure
from mlx_provider.families.tokenizer import load_tokenizer
from mlx_provider.families.vision.loading import load_with_processor
from mlx_provider.families.vision.model import vision_info

from .model import UNKNOWN_PIXELS, AnyVisionModel, image_text
from .separate import SeparateVisionModel

ESCAPED = (
    "the model's processor tokenises prompts with images by itself: control tokens in the text of "
    "users and tools are written with \\u escapes there"
)
NOT_REUSED = "a chat with images is prefilled anew at every turn, from its first image on"
"""Both are notes for the operator, on a model that fails the check."""
SIZES = ((112, 84), (140, 168))
"""Height and width of the two images: neither is square, and their numbers of patches differ."""
TOLERANCE = {"float32": 1e-3, "low": 0.1}
"""Largest difference, as a share of the largest value, by `ModelInfo.precision`."""


def load_any(folder: Path, options: LoadOptions) -> AnyVisionModel:
    """Load a `SeparateVisionModel` if it passes the check, else a plain `AnyVisionModel`. Raises
    `UnsupportedModel` for models that do not chat."""
    model, processor = load_with_processor(folder, options)
    chat = load_tokenizer(folder, options, getattr(processor, "tokenizer", None))
    text_config = getattr(model.config, "text_config", model.config)
    context = getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    token = _image_token(folder)
    sees = options.modality == "auto"
    info = vision_info(
        folder,
        options,
        model,
        chat,
        media=("image",) if sees else (),
        pixels=(1, UNKNOWN_PIXELS),
        image=image_text(processor, chat, token),
        default_context=int(context),
    )
    whole = AnyVisionModel(model, processor, info, chat, token)
    separate = SeparateVisionModel(model, processor, info, chat, token)
    one = mx.array([1])  # any token, at any position, shows `route` the recurrent layers
    route(lambda cache: separate.decode(one, cache, one), separate.make_cache())
    problem = problem_of(separate, whole) if sees else ""
    if not problem:
        return separate
    whole.info = replace(info, notes=(*info.notes, ESCAPED, f"{NOT_REUSED}: {problem}"))
    return whole


def _image_token(folder: Path) -> int | None:
    config = read_json(folder / "config.json")
    names = ("image_token_index", "image_token_id")
    return next((int(config[name]) for name in names if config.get(name) is not None), None)


def problem_of(separate: SeparateVisionModel, whole: AnyVisionModel) -> str:
    """The check. Why `separate` may not serve the model; empty: it may. Engine thread."""
    return failure(lambda: _difference(separate, whole))


def _difference(separate: SeparateVisionModel, whole: AnyVisionModel) -> str:
    images = [_image(seed, *size) for seed, size in enumerate(SIZES)]
    words = [{"type": "text", "text": text} for text in ("What is", "beside", "?")]
    content = [words[0], {"type": "image"}, words[1], {"type": "image"}, words[2]]
    request: dict[str, Any] = {"tools": [], "media": images, "variables": {}}
    messages = [{"role": "user", "content": content}]
    separate_prompt = separate.prepare(messages, **request)
    whole_prompt = whole.prepare(messages, **request)
    if list(separate_prompt.tokens) != list(whole_prompt.tokens):
        return "its processor writes an image otherwise beside others"
    tolerance = TOLERANCE[whole.info.precision]
    separate_features = {x.content_hash: separate.embed(x) for x in separate_prompt.spans}
    whole_features = {x.content_hash: whole.embed(x) for x in whole_prompt.spans}
    (all_images,) = whole_features.values()  # `AnyVisionModel` has one span
    rows = all_images.arrays["inputs_embeds"][0]
    for span in separate_prompt.spans:
        found = separate_features[span.content_hash].rows
        if _distance(found, rows[span.start : span.end]) > tolerance:
            return "an image's features depend on what stands beside it"
    first, end = separate_prompt.spans[0], len(whole_prompt.tokens)
    chunk_ends = ((first.start + first.end) // 2, end)
    found = _logits(separate, separate_prompt, separate_features, chunk_ends)
    if _distance(found, _logits(whole, whole_prompt, whole_features, (end,))) > tolerance:
        return "its language model reads images otherwise than by their embeddings"
    return ""


def _logits(
    model: LoadedModel, prompt: Prompt, features: dict[str, Any], ends: Sequence[int]
) -> mx.array:
    cache, start, logits = model.make_cache(), 0, mx.zeros(1)
    for end in ends:
        logits = model.prefill(PrefillChunk(prompt, start, end, cache, features))
        start = end
    return logits


def _distance(a: mx.array, b: mx.array) -> float:
    if a.shape != b.shape:
        return float("inf")
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    found: float = (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-6)).item()  # type: ignore[assignment]
    return found if found == found else float("inf")  # only NaN differs from itself


def _image(seed: int, height: int, width: int) -> MediaItem:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return MediaItem.of("image", pixels, f"proof {seed}")
