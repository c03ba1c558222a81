"""Any mlx-vlm model, by the calls that all of them have. It embeds a prompt with all its images, so
no other prompt can reuse the features. The model that `separate.py` derives embeds each image."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from mlx_provider import (
    Features,
    MediaError,
    MediaItem,
    MediaSpan,
    ModelInfo,
    OnDemand,
    PrefillChunk,
    Prompt,
)
from mlx_provider.families.caches import row_cache
from mlx_provider.families.logits import Path, find_backbone, last_token, narrow_output, rows_at
from mlx_provider.families.tokenizer import HFTokenizer
from mlx_provider.families.vision.loading import embed, language_logits, model_inputs
from mlx_provider.families.vision.model import (
    ExpandedItem,
    MediaFormat,
    VisionModel,
    ensure_placeholders,
    message_ends,
    name_item,
)
from mlx_provider.families.vision.patches import as_image, image_size

from . import passes

UNKNOWN_PIXELS = 4096 * 4096
"""The core scales larger images down to this, then the processor scales them by its own rules."""


@dataclass(frozen=True)
class PromptFeatures:
    arrays: Mapping[str, Any]
    """The embeddings of a whole prompt with its images, and what else mlx-vlm returns with them."""

    @property
    def nbytes(self) -> int:
        return sum(int(a.nbytes) for a in self.arrays.values() if isinstance(a, mx.array))


class AnyVisionModel(VisionModel):
    """The images of a prompt are one span, whose features are valid only for this prompt."""

    _prefill, _decode = staticmethod(passes.prefill), staticmethod(passes.decode)

    def __init__(
        self, model: Any, processor: Any, info: ModelInfo, chat: HFTokenizer, token: int | None
    ) -> None:
        self.image_token = token
        self.image_text = image_text(processor, chat, token)
        placeholder = chat.fast.token_to_id(self.image_text)
        form = MediaFormat(
            placeholders={"image": self.image_text},
            tokens=frozenset() if placeholder is None else frozenset({placeholder}),
            reserved=(self.image_text,),
            expand=self.expand,
        )
        super().__init__(model, info, chat, form)
        self.processor = processor
        self.backbone = _backbone(model)
        self._prefill_model = model
        if self.backbone is not None:
            self._prefill_model = narrow_output(model, self.backbone, last_token)

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem],
        variables: Mapping[str, Any],
    ) -> Prompt:
        """Render the messages. If there are images, the model's own processor tokenises the text.
        Raises `BadRequest` (template) and `MediaError` (processor, video)."""
        if not media:
            return super().prepare(messages, tools=tools, media=media, variables=variables)
        for item in media:
            image_size(item)
        tokenizer, placeholders = self.hf_tokenizer, self.media_format.placeholders
        # the processor would read control tokens that a user typed: all are escaped
        hidden, text = tokenizer.hide_and_render(messages, tools, variables, escaped=None)
        text = ensure_placeholders(tokenizer, placeholders, hidden, text, media)
        if len(text) > self.info.context_length:
            tokenizer.encode(text, special=False)  # only to raise `ContextTooLong` early
        inputs = OnDemand(lambda: self.process(text, media))
        ids = inputs()["input_ids"][0]
        tokens = [max(0, int(token)) for token in ids]  # some processors number images -1, -2, ...
        span = self._span(ids, inputs, media)
        # no other prompt can reuse what follows the first image
        ends = message_ends(tokens, self.info.stop_tokens)
        return Prompt(tokens, text, [span], snapshot_points=[e for e in ends if e <= span.start])

    def _span(
        self, ids: np.ndarray, inputs: OnDemand[Any], media: Sequence[MediaItem]
    ) -> MediaSpan:
        """From the first image token to the last; the whole prompt if none is known."""
        at = np.flatnonzero(ids == self.image_token)
        start, end = (int(at[0]), int(at[-1]) + 1) if at.size else (0, len(ids))
        digest = hashlib.sha256(np.ascontiguousarray(ids).tobytes())
        digest.update("".join(item.content_hash for item in media).encode())
        return MediaSpan(start, end, digest.hexdigest(), inputs, ready=inputs)

    def process(self, text: str, media: Sequence[MediaItem]) -> dict[str, np.ndarray]:
        """Output of the model's own processor. Raises `MediaError`."""
        images = [Image.fromarray(as_image(item, UNKNOWN_PIXELS)) for item in media]
        try:
            return model_inputs(self.processor, text, images, self.image_token)
        except (ValueError, TypeError, IndexError) as error:
            refusal = MediaError(f"the model's processor refused the request: {error}")
            raise (name_item(refusal, media[0]) if len(media) == 1 else refusal) from error

    def expand(self, item: MediaItem) -> ExpandedItem:
        raise NotImplementedError  # the processor expands the images of a prompt together

    def embed(self, span: MediaSpan) -> Features:
        inputs: Any = span.ready
        arrays = {key: mx.array(value) for key, value in inputs().items()}
        return self.features_of(embed(self.model, arrays))

    def features_of(self, made: dict[str, mx.array]) -> Features:
        """What `embed` returns for the arrays that mlx-vlm returns."""
        return PromptFeatures(made)

    def make_cache(self) -> list[Any]:
        return passes.make_cache(self.model)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        return self._prefill(self._prefill_model, chunk)

    def decode(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> mx.array:
        return rows_at(logits_at)(self._decode(self.model, tokens, cache, positions))


def image_text(processor: Any, chat: HFTokenizer, token: int | None) -> str:
    """The template's text for an image. `token`: id of the image token, if it is known."""
    for name in ("boi_token", "image_token"):
        text = getattr(processor, name, None)
        if isinstance(text, str) and text:
            return text
    return str((None if token is None else chat.fast.id_to_token(token)) or "<image>")


def _backbone(model: Any) -> Path | None:
    """The way from `model` to the part below its output matrix, for `narrow_output`."""

    def some_logits(language: Any) -> mx.array:
        ids, cache = mx.array([[1, 2, 3]]), row_cache(language)
        return language_logits(SimpleNamespace(language_model=language), ids, cache, {})

    path = find_backbone(model.language_model, some_logits)
    return None if path is None else ("language_model", *path)
