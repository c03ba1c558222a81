"""Any mlx-vlm 0.7.10 model, the way its own `generate_step` calls it.

Embeddings of a whole prompt, or of one image, come from `Model.get_input_embeddings`; its other
results are keyword arguments of the language model's prefill, which aligns them by its cache's
offset. M-RoPE models get every row's position, so that none is taken from the model object.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import UnsupportedModel
from ..records import LoadOptions, MediaSpan, PrefillChunk
from . import cpu_functions
from .attention import route
from .mlx_vlm import StateCache, load_model, row_cache
from .mlx_vlm_model import embeddings, pieces

REQUEST_STATE = ("_rope_deltas", "_position_ids")
"""What mlx-vlm's M-RoPE models remember of the last request."""


def load(folder: Path, options: LoadOptions) -> tuple[Any, Any]:
    """Model and processor of a checkpoint. Raises `UnsupportedModel`."""
    from mlx_vlm import utils

    model = load_model(folder, options)
    if not hasattr(model, "language_model") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModel(f"{type(model).__module__} generates no text from a chat")
    trust = options.trust_remote_code
    processor = utils.load_processor(folder, True, trust_remote_code=trust)
    images = utils.load_image_processor(folder, trust_remote_code=trust)
    if images is not None:
        processor.image_processor = images
    route(model.language_model)
    cpu_functions.adopt(model)
    return model, processor


def model_inputs(
    processor: Any, text: str, images: list[Any], image_token: int | None
) -> dict[str, np.ndarray]:
    """What the processor makes of a rendered prompt, as numpy arrays. Raises `ValueError`."""
    from mlx_vlm.utils import prepare_inputs

    made = prepare_inputs(
        processor,
        images=images or None,
        prompts=text,
        add_special_tokens=False,
        image_token_index=image_token,
    )
    return {key: np.array(value) for key, value in made.items() if isinstance(value, mx.array)}


def prompt_features(model: Any, inputs: Mapping[str, np.ndarray]) -> dict[str, mx.array]:
    """Embeddings of a whole prompt and what else its prefill needs."""
    arrays = {key: mx.array(value) for key, value in inputs.items()}
    ids, pixels = arrays.pop("input_ids"), arrays.pop("pixel_values", None)
    mask = arrays.pop("attention_mask", None)
    _forget(model.language_model)
    made = model.get_input_embeddings(ids, pixels, mask=mask, **arrays)
    _forget(model.language_model)
    found = {key: value for key, value in made.to_dict().items() if value is not None}
    mx.eval(found)
    return found


def make_cache(model: Any) -> list[Any]:
    """A row's cache; M-RoPE models get a last entry that holds the row's rotary delta."""
    entries = row_cache(model.language_model)
    return [*entries, StateCache(1)] if rotary(model) else entries


def prefill(model: Any, chunk: PrefillChunk) -> mx.array:
    """Append a chunk; logits (vocab,) after its last token, where it is the prompt's last.

    Tokens from the first image to the last pass through the model together, as soon as a chunk
    touches them, so the cache may run ahead of the chunk.
    """
    logits = mx.zeros(1)
    for span in chunk.prompt.spans:
        if _held(chunk) < min(span.start, chunk.stop):
            logits = _text(model, chunk, min(span.start, chunk.stop))
        if span.start < chunk.stop and _held(chunk) < span.end:
            # the last token of a prompt comes in a chunk of its own and must give logits
            end = min(span.end, max(chunk.stop, len(chunk.prompt.tokens) - 1))
            logits = _media(model, chunk, span, end)
    return _text(model, chunk, chunk.stop) if _held(chunk) < chunk.stop else logits


def prefill_separately(model: Any, chunk: PrefillChunk) -> mx.array:
    """Append a chunk of text and images that were embedded each by itself; see `prefill`.

    The cache is `row_cache`'s; M-RoPE models take the prompt's positions.
    """
    parts = pieces(chunk)
    ids = mx.array(np.asarray(chunk.prompt.tokens[chunk.start : chunk.stop], np.int32))[None]
    more: dict[str, Any] = {}
    if any(part.features is not None for part in parts):
        more["inputs_embeds"] = embeddings(chunk, parts, lambda text: _text_rows(model, text))
        more["n_to_process"] = chunk.stop - chunk.start
    if rotary(model):
        more |= {"position_ids": _positions(chunk), "rope_deltas": mx.zeros((1, 1), mx.int32)}
    return _called(model, ids, chunk.cache, more)[0, -1]


def decode_separately(
    model: Any, tokens: mx.array, cache: list[Any], positions: mx.array
) -> mx.array:
    """See `decode`; `positions` are rotary ones, and the cache holds none."""
    more = {}
    if rotary(model):
        more["position_ids"] = mx.broadcast_to(positions[None, :, None], (3, positions.size, 1))
        more["rope_deltas"] = mx.zeros((positions.size, 1), mx.int32)
    return _called(model, tokens[:, None], cache, more)[:, -1]


def _text_rows(model: Any, tokens: mx.array) -> mx.array:
    rows: mx.array = prompt_features(model, {"input_ids": np.array(tokens)[None]})["inputs_embeds"]
    return rows[0]


def _positions(chunk: PrefillChunk) -> mx.array:
    length = chunk.stop - chunk.start
    if chunk.prompt.positions is None:
        return mx.broadcast_to(mx.arange(chunk.start, chunk.stop)[None, None], (3, 1, length))
    return mx.array(chunk.prompt.positions[:, None, chunk.start : chunk.stop])


def _held(chunk: PrefillChunk) -> int:
    """Tokens in the row's cache; a cache without any attention layer is never ahead."""
    offsets = [int(entry.offset) for entry in chunk.cache if hasattr(entry, "offset")]
    return max(offsets, default=chunk.start)


def _text(model: Any, chunk: PrefillChunk, stop: int) -> mx.array:
    tokens = np.asarray(chunk.prompt.tokens[_held(chunk) : stop], np.int32)
    return _step(model, mx.array(tokens)[None], chunk.cache)


def _media(model: Any, chunk: PrefillChunk, span: MediaSpan, end: int) -> mx.array:
    start = _held(chunk)
    more = dict(chunk.features[span.content_hash].arrays)
    embedded = more.pop("inputs_embeds")
    if "position_ids" in more:
        more["position_ids"] = more["position_ids"][..., start:end]
    if rotary(model):
        chunk.cache[-1][0] = more.get("rope_deltas", mx.zeros((1, 1), mx.int32))
    ids = mx.array(np.asarray(chunk.prompt.tokens[start:end], np.int32))[None]
    # a slice: some models scale the embeddings they are given in place (Gemma 3)
    rows = embedded[:, start:end]
    return _step(model, ids, chunk.cache, inputs_embeds=rows, n_to_process=end - start, **more)


def decode(model: Any, tokens: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
    """One token of every row; logits (B, vocab). `positions`: tokens before each, (B,)."""
    more = {}
    if rotary(model):
        at = positions + cache[-1][0].reshape(-1)
        more["position_ids"] = mx.broadcast_to(at[None, :, None], (3, at.size, 1))
    return _logits(model, tokens[:, None], cache, **more)[:, -1]


def _step(model: Any, ids: mx.array, cache: list[Any], **more: Any) -> mx.array:
    """Tokens of one row; logits (vocab,) after the last."""
    if rotary(model) and cache[-1][0] is None:
        cache[-1][0] = mx.zeros((1, 1), mx.int32)
    return _logits(model, ids, cache, **more)[0, -1]


def _logits(model: Any, ids: mx.array, cache: list[Any], **more: Any) -> mx.array:
    if not rotary(model):
        return _called(model, ids, cache, more)
    return _called(model, ids, cache[:-1], {"rope_deltas": cache[-1][0]} | more)


def _called(model: Any, ids: mx.array, layers: list[Any], more: dict[str, Any]) -> mx.array:
    """The language model; logits (B, length, vocab)."""
    language = model.language_model
    _forget(language)
    try:
        made = language(ids, cache=layers, **_accepted(language, more))
    finally:
        _forget(language)
    if getattr(made, "cross_attention_states", None) is not None:
        raise UnsupportedModel("models that attend across to an encoder are not served")
    logits: mx.array = made.logits if hasattr(made, "logits") else made
    return logits


def _accepted(language: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the callee takes, plus `None` for what it demands beyond them.

    Some models declare `pixel_values` or `mask` without a default.
    """
    parameters = list(inspect.signature(type(language).__call__).parameters.values())[2:]
    wild = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters}
    taken = {k: v for k, v in arguments.items() if wild or k in named}
    demanded = {
        p.name: None
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    demanded.pop("cache", None)
    return demanded | taken


def rotary(model: Any) -> bool:
    """Whether it has M-RoPE: positions in time, height and width."""
    return hasattr(model.language_model, "_rope_deltas")


def _forget(language: Any) -> None:
    for name in REQUEST_STATE:
        if hasattr(language, name):
            setattr(language, name, None)
