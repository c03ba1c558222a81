"""Hides control tokens in a client's strings from the chat template and the tokenizer, and spells
them in letters in the rendered text.

`hide` replaces one character of each by a *mark*: a private character that occurs nowhere in the
input, has no case, is not white space and passes JSON. So the tokenizer finds only the template's
own control tokens. `encode_spelled` cuts the text at these. It encodes each piece with marks again,
with the original characters, by a tokenizer with the same model but no control tokens. An *anchor*,
a private added token, precedes each such piece: some tokenizers begin a text with a space.

`sanitize_control_tokens` of transformers 5.23 renders in this process, and lacks keys of mappings,
tokens that a template joins or a normalizer makes, vocabularies with control tokens, offsets."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from ...errors import BadRequest
from .control_tokens import SPACE_SIGN, ControlTokens, pattern_of

MARKS = (
    *(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFD)),
    range(0xA000, 0xA48D),
)
"""Code points of marks: private ones, and Yi syllables for normalizers that drop private ones."""
UNKNOWN = "\U0010fffd"
"""In no vocabulary: a tokenizer encodes it as its unknown token."""
JOINED = 4096
"""Replacements whose parts are in memory at once. A part takes about a hundred bytes."""

Messages = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Hidden:
    """A client's input, whose strings may hold marks."""

    messages: Messages
    tools: Messages
    variables: Variables
    marks: Mapping[str, str] = field(default_factory=dict)
    """Mark -> the client's character."""

    def reveal(self, text: str) -> str:
        """A rendered text with the client's characters in place of the marks."""
        return with_signs(text, self.marks)

    def restore_marks(self, text: str) -> str:
        """A rendered text in which marks that a template wrote as JSON escapes are marks again."""
        for mark in self.marks:
            text = text.replace(json.dumps(mark)[1:-1], mark)
        return text

    def lost_characters(self, text: str) -> frozenset[str]:
        """The client's characters whose mark is missing in a rendered text."""
        return frozenset(char for mark, char in self.marks.items() if mark not in text)


def hide(
    control: ControlTokens, given: Hidden, *, escaped: Container[str] | None = (), used: str = ""
) -> Hidden:
    """`given` with marks, so that no string in it holds a control token.

    `escaped`: characters to write as a visible `\\uXXXX` instead of a mark; `None`: all.
    `used`: text whose characters cannot be marks, besides those of the input."""
    strings = _strings(given)
    touched = {text for text in strings if control.touched(text)}
    if not touched:
        return given
    breaks = {text: control.breaks(text) for text in touched}
    replaced = {text[i] for text, places in breaks.items() for i in places}
    plain = replaced if escaped is None else {c for c in replaced if c in escaped}
    free = filter(control.keeps, free_marks("\0".join([used, *strings])))
    marks = dict(zip(free, sorted(replaced - plain), strict=False))
    # characters without a mark get their JSON escape
    signs = {c: _escape(c) for c in replaced} | {c: mark for mark, c in marks.items()}

    def change(text: str) -> str:
        places = breaks.get(text)
        return text if places is None else _replace(text, places, signs)

    return _change_strings(given, change, marks)


def _escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def with_signs(text: str, signs: Mapping[str, str]) -> str:
    """`text` with each key of `signs` replaced by its value, in which no key may occur."""
    for char, sign in signs.items():
        text = text.replace(char, sign)
    return text


def _change_strings(
    given: Hidden, change: Callable[[str], str], marks: Mapping[str, str]
) -> Hidden:
    return Hidden(
        [_message(message, change) for message in given.messages],
        _map(given.tools, change),
        {name: _map(value, change) for name, value in given.variables.items()},
        marks,
    )


def free_marks(text: str) -> Iterator[str]:
    """Marks that do not occur in `text`, neither literally nor as JSON escapes."""
    present = {*text}
    escaped = {match[0].lower() for match in re.finditer(r"(?i)\\u[0-9a-f]{4}", text)}
    for mark in map(chr, chain(*MARKS)):
        if mark not in present and json.dumps(mark)[1:7] not in escaped:
            yield mark


def _message(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Roles and field names are normalised, so they are never the client's text."""
    return {k: v if k == "role" else _map(v, change) for k, v in message.items()}


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map(key, change): _map(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, change) for item in value]
    return value


def _replace(text: str, places: Sequence[int], signs: Mapping[str, str]) -> str:
    joined, at = [], 0
    for first in range(0, len(places), JOINED):
        parts = []
        for place in places[first : first + JOINED]:
            parts += [text[at:place], signs[text[place]]]
            at = place + 1
        joined.append("".join(parts))
    return "".join([*joined, text[at:]])


def _strings(given: Hidden) -> list[str]:
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    _change_strings(given, note, {})
    return found


@dataclass(frozen=True)
class Encoded:
    ids: list[int]
    starts: list[int]
    """Index of the character at which each token begins."""


@dataclass(frozen=True)
class _Piece:
    """Tokens `first .. last`, characters `start .. stop` between the template's control tokens."""

    first: int
    last: int
    start: int
    stop: int
    after: int | None
    """Id of the control token before it. `None`: the beginning of the text."""


def encode_spelled(
    fast: Any,
    control: ControlTokens,
    text: str,
    marks: Mapping[str, str],
    found: Sequence[int],
    spans: Spans,
) -> Encoded:
    """The tokens of a rendered text with the client's characters in place of `marks`. `found`,
    `spans`: ids and (first, end) characters of its tokens by the complete tokenizer, `fast`."""
    controls = [i for i, token in enumerate(found) if token in control.content]
    parts = {i: text[slice(*spans[i])] for i in controls}
    written = [i for i, part in parts.items() if _is_literal(part, control.content[found[i]])]
    pieces = [*_pieces(found, spans, written, len(text))]
    # an id that the template did not write comes from letters that a normalizer changed
    odd = [spans[i][0] for i in set(controls) - set(written)]
    places = [*odd, *(match.start() for match in re.finditer(pattern_of(marks), text))]
    starts = [piece.start for piece in pieces]
    to_spell = [pieces[n] for n in sorted({bisect_right(starts, at) - 1 for at in places})]
    if not to_spell:
        return Encoded(list(found), [start for start, _ in spans])
    original = with_signs(text, marks)
    spellings = Letters(fast, control, original).encode(original, to_spell)
    return _join(found, spans, to_spell, spellings)


def _is_literal(part: str, content: str) -> bool:
    """Whether a part of the text is literally `content`, with the white space that it absorbs."""
    return not part.replace(content, "", 1).replace(SPACE_SIGN, " ").strip()


def _pieces(
    found: Sequence[int], spans: Spans, controls: Sequence[int], length: int
) -> Iterator[_Piece]:
    first, start, after = 0, 0, None
    for i in controls:
        yield _Piece(first, i, start, spans[i][0], after)
        first, start, after = i + 1, spans[i][1], found[i]
    yield _Piece(first, len(found), start, length, after)


def _join(
    found: Sequence[int], spans: Spans, pieces: Sequence[_Piece], spellings: Sequence[Encoded]
) -> Encoded:
    ids: list[int] = []
    starts: list[int] = []
    at = 0
    for piece, spelling in zip(pieces, spellings, strict=True):
        ids += [*found[at : piece.first], *spelling.ids]
        starts += [*(start for start, _ in spans[at : piece.first]), *spelling.starts]
        at = piece.last
    return Encoded([*ids, *found[at:]], [*starts, *(start for start, _ in spans[at:])])


class Letters:
    """Encodes pieces of `text` with the model and added tokens of `fast`, except control tokens."""

    def __init__(self, fast: Any, control: ControlTokens, text: str) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._model = fast.model
        self._control = control
        self._plain = Tokenizer(fast.model)
        if fast.normalizer is not None:
            self._plain.normalizer = fast.normalizer
        if fast.pre_tokenizer is not None:
            self._plain.pre_tokenizer = fast.pre_tokenizer
        # the late anchor is found after normalising: text after such a token begins differently
        free = [*islice(filter(control.keeps, free_marks(text)), 2)]
        if len(free) < 2:
            raise BadRequest("the text holds every private character of Unicode", param="messages")
        self._anchor, self._late_anchor = free
        anchors = [AddedToken(self._anchor, normalized=False), AddedToken(self._late_anchor)]
        self._plain.add_tokens([*control.vocabulary, *anchors])
        kept = [token.content for token in control.vocabulary]
        self._ids = {self._plain.token_to_id(c): fast.token_to_id(c) for c in kept}
        self._anchor_ids = [self._plain.token_to_id(c) for c in free]
        unknown = {token.id for token in fast.model.tokenize(UNKNOWN)}
        self._forbidden = control.content.keys() - unknown

    def encode(self, text: str, pieces: Sequence[_Piece]) -> list[Encoded]:
        """The tokens of each piece of `text`. All are encoded in one call."""
        parts, shifts, length = [], [], 0
        for piece in pieces:
            parts.append(self._before(piece) + text[piece.start : piece.stop])
            length += len(parts[-1])
            shifts.append(piece.stop - length)  # from the joined parts to `text`
        encoding = self._plain.encode("".join(parts), add_special_tokens=False)
        made = [Encoded([], []) for _ in pieces]
        at = 0 if pieces[0].after is None else -1  # the piece: each begins with an anchor
        for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._anchor_ids:
                at += token == self._anchor_ids[0]
                continue
            ids = self._allow(self._ids.get(token, token))
            made[at].ids.extend(ids)
            made[at].starts.extend([start + shifts[at]] * len(ids))
        return made

    def _before(self, piece: _Piece) -> str:
        """The anchors for a piece; after a token that is found after normalising, it needs both."""
        if piece.after is None:
            return ""
        return self._anchor + self._late_anchor * (piece.after in self._control.normalized)

    def _allow(self, token: int) -> list[int]:
        """The token, or those of its letters if the vocabulary itself has a control token."""
        return self._spell(self._model.id_to_token(token)) if token in self._forbidden else [token]

    def _spell(self, content: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(content)]
        if self._forbidden.isdisjoint(ids):
            return ids
        # a single character that is only a control token has no other spelling
        return self._spell(content[:1]) + self._spell(content[1:]) if len(content) > 1 else []
