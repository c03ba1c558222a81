"""Converts messages and media to tokens: template, media placeholders, spans, snapshot points.

A family defines the tokens of the rendered template that represent media, and their replacements.
The same text typed by a user stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import BadRequest, MediaError
from ...records import MediaItem, MediaSpan, OnDemand, Prompt
from ..tokenizer import HFTokenizer, common_length


@dataclass(frozen=True)
class Block:
    """A run of equal media tokens: one image, or one group of video frames."""

    count: int
    content_hash: str
    inputs: Any
    ready: OnDemand[Any] | None = None


@dataclass(frozen=True)
class Placed:
    """Text with one media token per block, in place of a media placeholder."""

    text: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class MediaMarks:
    """How a family's template and tokenizer write media."""

    placeholders: Mapping[str, str]
    """The template's text for one item, by kind of media."""
    tokens: frozenset[int]
    """Each represents one block before expansion."""
    reserved: tuple[str, ...]
    """Texts of tokens that users must not produce by typing them, added tokens or not."""
    place: Callable[[MediaItem], Placed]
    """Preprocess one item, pixels preferably in `Block.ready`. Raises `MediaError`."""


def no_media(item: MediaItem) -> Placed:
    raise MediaError(f"this checkpoint has no vision weights: it takes no {item.kind}")


def build_prompt(
    tokenizer: HFTokenizer,
    marks: MediaMarks,
    stop_tokens: frozenset[int],
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]],
    media: Sequence[MediaItem],
    variables: Mapping[str, Any],
) -> Prompt:
    """Raises `BadRequest` (template, or media that it did not place)."""
    hidden, text = tokenizer.rendered(messages, tools, variables)
    filled, blocks = _fill(text, marks, media)
    # a template writes its own BOS, so the tokenizer must not add another
    short = tokenizer.tokens(filled, hidden)
    tokens, spans = _expand(short, marks.tokens, blocks)
    ends = {*message_ends(tokens, stop_tokens)}
    system = tokenizer.system_part(hidden, text)
    if not any(tokenizer.decode([stop], skip_special=False) in system for stop in stop_tokens):
        ends.add(common_length(tokenizer.tokens(system, hidden), tokens))
    return Prompt(
        tokens=tokens,
        text=hidden.reveal(text),
        spans=spans,
        snapshot_points=tuple(sorted(ends - {0})),
    )


def message_ends(tokens: Sequence[int], stop_tokens: frozenset[int]) -> tuple[int, ...]:
    """Token counts at the end of the first two messages, which later conversations may share, and
    of the last one. Templates close every turn with a token that also ends a reply."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in stop_tokens]
    return tuple(sorted({*ends[:2], *ends[-1:]}))


def _fill(text: str, marks: MediaMarks, media: Sequence[MediaItem]) -> tuple[str, list[Block]]:
    kinds = {placeholder: kind for kind, placeholder in marks.placeholders.items()}
    pattern = "|".join(map(re.escape, sorted(kinds, key=len, reverse=True)))
    found = list(re.finditer(pattern, text)) if pattern else []
    wanted = [item.kind for item in media]
    if [kinds[match[0]] for match in found] != wanted:
        raise BadRequest(
            f"the chat template placed {len(found)} of {len(wanted)} images or videos; "
            "this model does not take them in these messages",
            param="messages",
        )
    pieces: list[str] = []
    blocks: list[Block] = []
    end = 0
    for match, placed in zip(found, _placed(marks, media), strict=True):
        pieces += [text[end : match.start()], placed.text]
        blocks += placed.blocks
        end = match.end()
    return "".join([*pieces, text[end:]]), blocks


def _placed(marks: MediaMarks, media: Sequence[MediaItem]) -> list[Placed]:
    """Raises `MediaError` that names every item at fault."""
    placed: list[Placed] = []
    failed: list[MediaError] = []
    for item in media:
        try:
            placed.append(marks.place(item))
        except MediaError as error:
            failed.append(named(error, item))
    if failed:
        raise MediaError.joined(failed)
    return placed


def named(error: MediaError, item: MediaItem) -> MediaError:
    """The error of a model that refuses the item, with its part of the request."""
    if error.param is not None or not item.path:
        return error
    text = f"{item.path}: {error.message}"
    return MediaError(text, param=item.path, brief="this model cannot take it")


def _expand(
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
        tokens += [token] * block.count
        spans.append(MediaSpan(start, len(tokens), block.content_hash, block.inputs, block.ready))
    if len(spans) != len(blocks):
        raise BadRequest("the tokenizer split a media token; this checkpoint is broken")
    return tokens, spans
