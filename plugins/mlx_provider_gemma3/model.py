"""Gemma 3, with and without its vision tower, and the operator's sliding window for both.

mlx-vlm 0.7.10 (models/gemma3/language.py) attends causally everywhere. In the reference
(transformers 5.23, models/gemma3/modeling_gemma3.py, `create_masks_for_vision_model`), the tokens
of one image see each other, in sliding layers within the window. `prefill` here does the same."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_provider import BadRequest, LoadOptions, MediaItem, MediaSpan, OnDemand, PrefillChunk
from mlx_provider.families.caches import KVCache, RotatingKVCache, append_kv
from mlx_provider.families.checkpoint import read_json
from mlx_provider.families.layers import route_attention
from mlx_provider.families.logits import rows_at
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.families.tokenizer import load_tokenizer
from mlx_provider.families.vision.loading import load_model, replace_attribute
from mlx_provider.families.vision.model import (
    Block,
    ExpandedItem,
    MediaFormat,
    VisionFeatures,
    VisionModel,
    embeddings,
    head,
    pieces,
    refuse_media,
    vision_info,
)
from mlx_provider.families.vision.patches import image_size

WINDOW_VARIABLE = "GEMMA3_SLIDING_WINDOW"
"""Tokens that sliding layers see, instead of the checkpoint's number; 0: all. A larger window costs
memory and is not what the model was trained with."""


def chosen_window(environ: Mapping[str, str] = os.environ) -> int | None:
    """The operator's window; `None`: the checkpoint's. Raises `BadRequest` for other text."""
    text = environ.get(WINDOW_VARIABLE, "")
    if text and not text.isdecimal():
        raise BadRequest(f"{WINDOW_VARIABLE}={text!r} is not a number of tokens")
    return int(text) if text else None


def _variant(window: int | None) -> str:
    """Distinguishes the KV of a model with another window."""
    return "" if window is None else f":window={window}"


def load_gemma3(folder: Any, options: LoadOptions) -> Any:
    """Load with mlx-vlm. The embedding is also the output matrix if the checkpoint has no other.
    Upstream's `LanguageModel.sanitize` never finds a checkpoint's own output matrix, overwrites it
    with the embedding, and copies no `scales` of that."""
    from mlx_vlm.models.gemma3 import language

    def sanitize(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
        if "language_model.lm_head.weight" not in weights:
            for part in ("weight", "scales", "biases"):
                source = f"language_model.model.embed_tokens.{part}"
                if source in weights:
                    weights[f"language_model.lm_head.{part}"] = weights[source]
        return {k: v for k, v in weights.items() if "rotary_emb.inv_freq" not in k}

    patch = replace_attribute(language.LanguageModel, "sanitize", sanitize)
    return load_model(folder, options, patch=patch)


def set_window(language_model: Any, window: int) -> None:
    """Sliding layers see the last `window` tokens; 0: all tokens."""
    language_model.model.window_size = window or None
    language_model.config.sliding_window = window


def row_cache(language_model: Any) -> list[Any]:
    """An empty row cache. Sliding layers have a ring, unless the window is switched off."""
    window = language_model.config.sliding_window
    return [
        RotatingKVCache(max_size=window) if layer.self_attn.is_sliding and window else KVCache()
        for layer in language_model.layers
    ]


def image_rows(model: Any, pixels: mx.array) -> mx.array:
    """Projected image tokens (tokens, hidden) of one image (1, 3, H, W)."""
    dtype = model.vision_tower.vision_model.embeddings.patch_embedding.weight.dtype
    channels_last = pixels.transpose(0, 2, 3, 1).astype(dtype)
    hidden, _, _ = model.vision_tower(channels_last, output_hidden_states=True)
    rows: mx.array = model.multi_modal_projector(hidden)[0]
    return rows


class Ahead:
    """A layer's cache that stores only the first `count` new tokens. The others are used once and
    dropped: they are the rest of an image that the chunk cuts."""

    def __init__(self, cache: Any, count: int) -> None:
        self.cache = cache
        self.count = count

    def __getattr__(self, name: str) -> Any:
        """Attention asks for `offset`, and of a quantised cache for `bits` and `group_size`."""
        return getattr(self.cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Keys and values in order of position; quantised ones are (values, scales, biases)."""
        kept = keys[..., : self.count, :], values[..., : self.count, :]
        found = append_kv(self.cache, *kept)
        if keys.shape[2] == self.count:
            return found[0], found[1]
        passing = keys[..., self.count :, :], values[..., self.count :, :]
        return tuple(starmap(self._extend, zip(found, passing, strict=True)))

    def _extend(self, cached: Any, passing: mx.array) -> Any:
        if isinstance(cached, mx.array):
            return mx.concatenate([cached, passing], axis=2)
        bits, group = self.cache.bits, self.cache.group_size
        more = mx.quantize(passing, group_size=group, bits=bits)
        return tuple(mx.concatenate([a, b], axis=2) for a, b in zip(cached, more, strict=True))


def image_masks(
    spans: Sequence[MediaSpan], start: int, end: int, window: int | None
) -> tuple[mx.array, mx.array]:
    """Which keys the tokens `start .. end` see, (queries, keys) bool: in layers that see all, and
    in sliding layers, whose keys begin `window` - 1 tokens before `start`. `window` 0 or `None`: no
    limit."""
    image_numbers = np.full(end, -1, np.int32)
    for number, span in enumerate(spans):
        image_numbers[span.start : span.end] = number
    images = mx.array(image_numbers)

    def mask(first_key: int) -> mx.array:
        queries, keys = mx.arange(start, end)[:, None], mx.arange(first_key, end)[None]
        same_image = images[start:end, None] == images[None, first_key:end]
        return (keys <= queries) | (same_image & (images[start:end, None] >= 0))

    full = mask(0)
    if not window:
        return full, full
    first = max(0, start - (window - 1))  # what the ring keeps before a chunk is appended
    queries, keys = mx.arange(start, end)[:, None], mx.arange(first, end)[None]
    return full, mask(first) & (keys > queries - window)


def prefill(model: Any, chunk: PrefillChunk) -> mx.array:
    """Append a chunk. Returns logits (vocab,) after its last token."""
    language = model.language_model
    if not any(s.start < chunk.stop and s.end > chunk.start for s in chunk.prompt.spans):
        tokens = np.asarray(chunk.prompt.tokens[chunk.start : chunk.stop], np.int32)
        hidden = language.model(mx.array(tokens)[None], cache=chunk.cache)
        return head(language, hidden[:, -1:])[0, 0]
    # if the chunk cuts an image, the rest of it runs, too: the tokens of an image see each other
    cut = [s.end for s in chunk.prompt.spans if s.start < chunk.stop < s.end]
    end, count = max([chunk.stop, *cut]), chunk.stop - chunk.start
    full, sliding = image_masks(chunk.prompt.spans, chunk.start, end, language.model.window_size)

    def embed(tokens: mx.array) -> mx.array:
        text: mx.array = language.model.embed_tokens(tokens)
        scale = mx.array(language.model.config.hidden_size**0.5, mx.bfloat16)
        return text * scale.astype(text.dtype)

    hidden = embeddings(chunk, pieces(chunk, end), embed).astype(language.model.norm.weight.dtype)
    for layer, entry in zip(language.layers, chunk.cache, strict=True):
        mask = sliding if layer.self_attn.is_sliding else full
        hidden = layer(hidden, mask, Ahead(entry, count))
    hidden = language.model.norm(hidden[:, count - 1 : count])
    return head(language, hidden)[0, 0]


class GemmaModel(VisionModel):
    """Gemma 3 with images. Its caches know the positions; `decode` ignores those it is given."""

    def embed(self, span: MediaSpan) -> VisionFeatures:
        return VisionFeatures(image_rows(self.model, mx.array(span.inputs.values())))

    def make_cache(self) -> list[Any]:
        return row_cache(self.model.language_model)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        return prefill(self.model, chunk)

    def decode(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> mx.array:
        language = self.model.language_model
        hidden = language.model(tokens[:, None], cache=cache)
        return head(language, rows_at(logits_at)(hidden))[:, -1]


@dataclass(frozen=True)
class GemmaInput:
    """What the vision tower takes for one image. `pixels`: (height, width, 3), scaled already."""

    pixels: OnDemand[NDArray[np.uint8]]
    processor: Any

    def values(self) -> NDArray[np.float32]:
        """Normalised pixels (1, 3, height, width)."""
        options = {"return_tensors": "np", "input_data_format": "channels_last"}
        made = self.processor(self.pixels(), do_pan_and_scan=False, **options)
        return np.asarray(made["pixel_values"], np.float32)


@dataclass(frozen=True)
class GemmaImages:
    """Every image becomes one square of fixed size and one fixed number of tokens."""

    processor: Any
    tokens: int

    @property
    def pixels(self) -> int:
        """Number of pixels of the square."""
        return int(self.processor.size["height"] * self.processor.size["width"])

    def expand(self, item: MediaItem) -> ExpandedItem:
        image_size(item)  # raises for what is no image
        size, resample = self.processor.size, int(self.processor.resample)
        pixels = OnDemand(lambda: item.scale(size["height"], size["width"], resample))
        block = Block(self.tokens, item.content_hash, GemmaInput(pixels, self.processor), pixels)
        return ExpandedItem("\n\n<start_of_image><image_soft_token><end_of_image>\n\n", (block,))


def load_gemma(folder: Path, options: LoadOptions) -> GemmaModel:
    """Load a checkpoint of the family `gemma3`, with mlx-vlm."""
    window = chosen_window()
    tokenizer = load_tokenizer(folder, options)
    model = load_gemma3(folder, options)
    if window is not None:
        set_window(model.language_model, window)
    images = None if model.vision_tower is None else _images(folder)
    info = vision_info(
        folder,
        options,
        model,
        tokenizer,
        media=() if images is None else ("image",),
        pixels=(0, 0) if images is None else (images.pixels, images.pixels),
        image="<start_of_image>",
        variant=_variant(window),
    )
    route_attention(model.language_model)
    return GemmaModel(model, info, tokenizer, _media_format(folder, images))


def _images(folder: Path) -> GemmaImages:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    config = read_json(folder / "config.json")
    processor = read_json(folder / "processor_config.json")
    tokens = processor.get("image_seq_length") or config.get("mm_tokens_per_image") or 256
    return GemmaImages(Gemma3ImageProcessorPil.from_pretrained(folder), int(tokens))


def _media_format(folder: Path, images: GemmaImages | None) -> MediaFormat:
    config = read_json(folder / "config.json")
    token = config.get("image_token_index") or config.get("image_token_id")
    return MediaFormat(
        placeholders={} if images is None else {"image": "<start_of_image>"},
        tokens=frozenset() if token is None else frozenset({int(token)}),
        reserved=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        expand=refuse_media if images is None else images.expand,
    )


def load_gemma_text(folder: Path, options: LoadOptions) -> TextModel:
    """Load a checkpoint of the family `gemma3_text`, with mlx-lm."""
    window = chosen_window()

    def change(model: Any) -> None:
        if window is not None:
            set_text_window(model, window)

    return load_text(folder, options, change=change, variant=_variant(window))


def set_text_window(model: Any, window: int) -> None:
    """Sliding layers see the last `window` tokens; 0: all tokens. Masks and caches follow the
    model's arguments at every call (models/gemma3_text.py and gemma3.py of mlx-lm 0.32.2)."""
    text = getattr(model, "language_model", model)
    if window:
        text.args.sliding_window = text.model.window_size = window
    else:  # with a pattern of 1, every layer sees all tokens
        text.args.sliding_window_pattern = text.model.sliding_window_pattern = 1
