"""One loaded Gemma 3 model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_provider import Features, LoadOptions, MediaItem, MediaSpan, OnDemand, PrefillChunk
from mlx_provider.families.attention import route
from mlx_provider.families.checkpoint import read_json
from mlx_provider.families.logits import rows_at
from mlx_provider.families.tokenizer import load_tokenizer
from mlx_provider.families.vision.images import image_size
from mlx_provider.families.vision.info import vision_info
from mlx_provider.families.vision.language import head
from mlx_provider.families.vision.model import VisionFeatures, VisionModel, embedded
from mlx_provider.families.vision.prompt import Block, MediaMarks, Placed, no_media
from mlx_provider.families.vision.slices import in_slices

from .language import image_rows, load_gemma3, prefill, row_cache, set_window
from .window import chosen_window

DEFAULT_CONTEXT = 131072
"""Gemma 3's configs leave it out (transformers 5.23, `Gemma3TextConfig`)."""


class GemmaModel(VisionModel):
    """Positions come from the caches' offsets; `decode` needs none."""

    kv_layouts: Sequence[str] = ("grouped", "merged", "solo")

    def embed(self, span: MediaSpan) -> Features:
        return embedded(self, span)

    def embed_in_slices(self, spans: Sequence[MediaSpan]) -> Iterator[Sequence[VisionFeatures]]:
        for span in spans:
            call = partial(image_rows, self.model, mx.array(span.inputs.values()))
            rows = yield from in_slices([self.model.vision_tower], call)
            yield [VisionFeatures(rows)]

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
    pixels: OnDemand[NDArray[np.uint8]]
    processor: Any

    def values(self) -> NDArray[np.float32]:
        """(1, 3, height, width)."""
        made = self.processor(
            self.pixels(),
            return_tensors="np",
            input_data_format="channels_last",
            do_pan_and_scan=False,
        )
        return np.asarray(made["pixel_values"], np.float32)


@dataclass(frozen=True)
class GemmaImages:
    """Every image becomes one square of fixed size and one fixed number of tokens."""

    processor: Any
    tokens: int

    @property
    def pixels(self) -> int:
        return int(self.processor.size["height"] * self.processor.size["width"])

    def place(self, item: MediaItem) -> Placed:
        """Raises `MediaError` for video."""
        image_size(item)
        size, resample = self.processor.size, int(self.processor.resample)
        pixels = OnDemand(lambda: item.scaled(size["height"], size["width"], resample))
        inputs = GemmaInput(pixels, self.processor)
        block = Block(self.tokens, item.content_hash, inputs, pixels)
        return Placed("\n\n<start_of_image><image_soft_token><end_of_image>\n\n", (block,))


def load_gemma(folder: Path, options: LoadOptions) -> GemmaModel:
    """Raises `BadRequest` for a window that is not a number."""
    window = chosen_window()
    tokenizer = load_tokenizer(folder, options)
    model = load_gemma3(folder, options)
    if window.tokens is not None:
        set_window(model.language_model, window.tokens)
    images = None if model.vision_tower is None else _images(folder)
    info = vision_info(
        folder,
        options,
        model,
        tokenizer,
        media=() if images is None else ("image",),
        pixels=(0, 0) if images is None else (images.pixels, images.pixels),
        image="<start_of_image>",
        default_context=DEFAULT_CONTEXT,
        variant=window.variant,
    )
    route(model.language_model)
    return GemmaModel(model, info, tokenizer, _marks(folder, images))


def _images(folder: Path) -> GemmaImages:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    config = read_json(folder / "config.json")
    processor = read_json(folder / "processor_config.json")
    tokens = processor.get("image_seq_length") or config.get("mm_tokens_per_image") or 256
    return GemmaImages(Gemma3ImageProcessorPil.from_pretrained(folder), int(tokens))


def _marks(folder: Path, images: GemmaImages | None) -> MediaMarks:
    config = read_json(folder / "config.json")
    token = config.get("image_token_index") or config.get("image_token_id")
    return MediaMarks(
        placeholders={} if images is None else {"image": "<start_of_image>"},
        tokens=frozenset() if token is None else frozenset({int(token)}),
        reserved=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        place=no_media if images is None else images.place,
    )
