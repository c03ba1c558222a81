"""What vision families share: prompts with media spans, their embeddings, and a loaded model.

A family defines the tokens of the rendered template that represent media, and their replacements.
The same text typed by a user stays text: `hidden` is the client's input, see `tokenizer.Hidden`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import BadRequest, MediaError
from ...records import (
    LoadOptions,
    MediaItem,
    MediaSpan,
    ModelInfo,
    OnDemand,
    PrefillChunk,
    Prompt,
    Tokenizer,
)
from ..caches import row_cache
from ..checkpoint import DEFAULT_CONTEXT, context_length, read_json, text_fields
from ..info import describe, precision
from ..tokenizer import HFTokenizer, Hidden, common_length
from ..tokenizer.template_probe import refuses_late_system, shows_tool_media
from .patches import rotary_positions


def head(language_model: Any, states: mx.array) -> mx.array:
    """Logits of final hidden states. Without an `lm_head`, the input embeddings give them."""
    output = language_model.get("lm_head") or language_model.model.embed_tokens.as_linear
    logits: mx.array = output(states)
    return logits


def vocab_size(language_model: Any) -> int:
    """Rows of the output matrix."""
    matrix = language_model.get("lm_head") or language_model.model.embed_tokens
    return int(matrix.weight.shape[0])


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
    """`media`: its kinds. `pixels`: least and most of an image. `image`: a template's text for one.
    `variant`: see `describe`. `default_context`: if config and operator give no context length."""
    config = read_json(folder / "config.json")
    text = text_fields(config)
    # `context_length` looks for `n_ctx` last
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


# ---- prompts: the template's text for each item becomes tokens and spans


@dataclass(frozen=True)
class Block:
    """One image, or one group of video frames, which becomes a `MediaSpan`."""

    count: int
    """Tokens of its span."""
    content_hash: str
    inputs: Any
    ready: OnDemand[Any] | None = None
    """Pixels, made at the first call. `None`: `inputs` are complete."""
    tokens: Sequence[int] = ()
    """The ids of its span. Empty: its media token, `count` times."""


@dataclass(frozen=True)
class ExpandedItem:
    """Text with one media token per block, in place of a media placeholder."""

    text: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class MediaFormat:
    """How a family's template and tokenizer write media."""

    placeholders: Mapping[str, str]
    """The template's text for one item, by kind of media."""
    tokens: frozenset[int]
    """Ids of media tokens. In an `ExpandedItem`'s text, each stands for one block."""
    reserved: tuple[str, ...]
    """Texts that users must not produce by typing, whether they are added tokens or not."""
    expand: Callable[[MediaItem], ExpandedItem]
    """Preprocess one item, pixels preferably in `Block.ready`. Raises `MediaError`."""


def refuse_media(item: MediaItem) -> ExpandedItem:
    """A `MediaFormat.expand` for checkpoints without vision weights. Raises `MediaError`."""
    raise MediaError(f"this checkpoint has no vision weights: it takes no {item.kind}")


def message_ends(tokens: Sequence[int], stop_tokens: frozenset[int]) -> tuple[int, ...]:
    """Token counts at the end of the first two messages, which later conversations may share, and
    of the last one. Templates close every turn with a token that also ends a reply."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in stop_tokens]
    return tuple(sorted({*ends[:2], *ends[-1:]}))


def ensure_placeholders(
    tokenizer: HFTokenizer,
    placeholders: Mapping[str, str],
    hidden: Hidden,
    text: str,
    media: Sequence[MediaItem],
) -> str:
    """`text`, the rendered prompt, if it has one placeholder per item. If not, the prompt rendered
    again with placeholders in the messages' texts. Raises `BadRequest` if that fails, too."""
    wanted = [placeholders.get(item.kind) for item in media]
    pattern = _placeholder_pattern(placeholders)
    if pattern.findall(text) == wanted:
        return text
    flat = [dict(message) for message in hidden.messages]
    for message in flat:
        if isinstance(parts := message.get("content"), list):
            texts = (part.get("text") or placeholders.get(part["type"], "") for part in parts)
            message["content"] = "".join(texts)
    text = hidden.restore_marks(tokenizer.apply_template(flat, hidden.tools, hidden.variables))
    if (found := pattern.findall(text)) != wanted:
        raise BadRequest(
            f"the chat template placed {len(found)} of {len(wanted)} images or videos; "
            "this model does not take them in these messages",
            param="messages",
        )
    return text


def _placeholder_pattern(placeholders: Mapping[str, str]) -> re.Pattern[str]:
    texts = sorted(placeholders.values(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _fill(text: str, form: MediaFormat, media: Sequence[MediaItem]) -> tuple[str, list[Block]]:
    found = _placeholder_pattern(form.placeholders).finditer(text)
    pieces: list[str] = []
    blocks: list[Block] = []
    end = 0
    for match, item in zip(found, _expand_items(form, media), strict=True):
        pieces += [text[end : match.start()], item.text]
        blocks += item.blocks
        end = match.end()
    return "".join([*pieces, text[end:]]), blocks


def _expand_items(form: MediaFormat, media: Sequence[MediaItem]) -> list[ExpandedItem]:
    expanded: list[ExpandedItem] = []
    failed: list[MediaError] = []
    for item in media:
        try:
            expanded.append(form.expand(item))
        except MediaError as error:
            failed.append(name_item(error, item))
    if failed:
        raise MediaError.with_others(failed)
    return expanded


def name_item(error: MediaError, item: MediaItem) -> MediaError:
    """The error with the item's place in the request, unless it names one."""
    if error.param is not None or not item.path:
        return error
    text = f"{item.path}: {error.message}"
    return MediaError(text, param=item.path, brief="this model cannot take it")


def _insert_spans(
    short: Sequence[int], media_tokens: frozenset[int], blocks: Sequence[Block]
) -> tuple[list[int], list[MediaSpan]]:
    tokens: list[int] = []
    spans: list[MediaSpan] = []
    waiting = iter(blocks)
    for token in short:
        block = next(waiting, None) if token in media_tokens else None
        if block is None:
            tokens.append(token)
            continue
        start = len(tokens)
        tokens += block.tokens or [token] * block.count
        spans.append(MediaSpan(start, len(tokens), block.content_hash, block.inputs, block.ready))
    if len(spans) != len(blocks):
        raise BadRequest("the tokenizer split a media token; this checkpoint is broken")
    return tokens, spans


# ---- chunks: text and features as the language model's input


@dataclass(frozen=True)
class VisionFeatures:
    rows: mx.array
    """What the tower makes of one media span: (tokens of the span, hidden)."""
    deepstack: tuple[mx.array, ...] = ()
    """For each of the first layers: (tokens of the span, hidden), added to its output."""

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + sum(layer.nbytes for layer in self.deepstack))


@dataclass(frozen=True)
class Piece:
    """Tokens `start .. stop` of the prompt, in one chunk: text, or a part of one media span."""

    start: int
    stop: int
    features: VisionFeatures | None = None
    offset: int = 0
    """Tokens of the span that are before `start`."""


def pieces(chunk: PrefillChunk, stop: int | None = None) -> list[Piece]:
    """The chunk divided at its media spans, in order. `stop`: end before this token."""
    end = chunk.stop if stop is None else stop
    found: list[Piece] = []
    at = chunk.start
    for span in chunk.prompt.spans:
        if span.end <= at or span.start >= end:
            continue
        if span.start > at:
            found.append(Piece(at, span.start))
            at = span.start
        upto = min(span.end, end)
        features = chunk.features[span.content_hash]
        found.append(Piece(at, upto, features, at - span.start))
        at = upto
    return [*found, Piece(at, end)] if at < end else found


def embeddings(
    chunk: PrefillChunk, pieces: Sequence[Piece], embed_tokens: Callable[[mx.array], mx.array]
) -> mx.array:
    """The language model's input (1, tokens, hidden) for the pieces."""
    rows: list[mx.array] = []
    for piece in pieces:
        if piece.features is None:
            text = mx.array(np.asarray(chunk.prompt.tokens[piece.start : piece.stop], np.int32))
            rows.append(embed_tokens(text))
        else:
            rows.append(media_rows(piece, piece.features.rows))
    dtype = embed_tokens(mx.array([0])).dtype  # of text, also for a chunk inside an image
    return mx.concatenate([piece_rows.astype(dtype) for piece_rows in rows])[None]


def media_rows(piece: Piece, rows: mx.array) -> mx.array:
    """The rows of a piece, of those (tokens of the span, hidden) of its whole span."""
    return rows[piece.offset : piece.offset + piece.stop - piece.start]


class VisionModel:
    """A `LoadedModel` over mlx-vlm, to which families add `embed`, `prefill` and `decode`."""

    kv_layouts: Sequence[str] = ("grouped", "merged", "solo")
    mrope = False
    """Whether its rotary positions have three axes."""

    def __init__(
        self, model: Any, info: ModelInfo, tokenizer: HFTokenizer, form: MediaFormat
    ) -> None:
        self.model = model
        self.info = info
        self.hf_tokenizer = tokenizer.reserving(form.reserved).within(info.context_length)
        self.tokenizer: Tokenizer = self.hf_tokenizer
        self.media_format = form

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem],
        variables: Mapping[str, Any],
    ) -> Prompt:
        """See `LoadedModel`. Raises `MediaError`, too, and `BadRequest` if media have no place."""
        tokenizer, form, stop_tokens = self.hf_tokenizer, self.media_format, self.info.stop_tokens
        hidden, text = tokenizer.hide_and_render(messages, tools, variables)
        text = ensure_placeholders(tokenizer, form.placeholders, hidden, text, media)
        filled, blocks = _fill(text, form, media)
        # a template writes its own BOS, so the tokenizer must not add another
        short = tokenizer.encode_hidden(filled, hidden)
        tokens, spans = _insert_spans(short, form.tokens, blocks)
        ends = {*message_ends(tokens, stop_tokens)}
        system = tokenizer.system_part(hidden, text)
        # a system message that a stop token closes is among `message_ends`
        if not any(tokenizer.decode([stop], skip_special=False) in system for stop in stop_tokens):
            ends.add(common_length(tokenizer.encode_hidden(system, hidden), tokens))
        points = tuple(sorted(ends - {0}))
        prompt = Prompt(tokens, hidden.reveal(text), spans, snapshot_points=points)
        if not (self.mrope and spans):
            return prompt
        positions, delta = rotary_positions(len(tokens), spans)
        return replace(prompt, positions=positions, rope_delta=delta)

    def make_cache(self) -> list[Any]:
        return row_cache(self.model.language_model)
