"""Hides control tokens in a client's strings from the chat template and the tokenizer, and spells
them in letters in the rendered text.

One character of each is replaced by a private one that occurs nowhere in the input, has the same
length and no case, is not white space and passes JSON. So the tokenizer finds only the template's
own control tokens. Text with hidden characters between two of them is encoded again, by a tokenizer
with the same model but no control tokens. A private added token precedes each such piece, because
some tokenizers write a space at the beginning of a text.

`sanitize_control_tokens` of transformers 5.23 does not suffice: it lacks keys of mappings, tokens
that a template joins or a normalizer makes, vocabularies with control tokens, and offsets, and it
renders in this process.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from ...errors import BadRequest
from .control_tokens import SPACE_SIGN, UNKNOWN, ControlTokens, any_of

MARKS = (
    *(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFD)),
    range(0xA000, 0xA48D),
)
"""Private characters, and Yi syllables for normalizers that drop those."""

JOINED = 4096
"""Replacements whose parts are in memory at once. A part takes about a hundred bytes."""

Messages = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]


@dataclass(frozen=True)
class Hidden:
    messages: Messages
    tools: Messages
    variables: Variables
    marks: Mapping[str, str] = field(default_factory=dict)
    """Private character -> the client's character."""

    def reveal(self, text: str) -> str:
        return with_signs(text, self.marks)

    def mend(self, text: str) -> str:
        """A rendered text in which marks in ASCII JSON form are restored."""
        return with_signs(text, {json.dumps(mark)[1:-1]: mark for mark in self.marks})

    def escape(self, text: str) -> str:
        """With a visible `\\uXXXX` in place of each hidden character."""
        return with_signs(text, {mark: f"\\u{ord(char):04x}" for mark, char in self.marks.items()})


def hide(control: ControlTokens, given: Hidden, taken: str = "") -> Hidden:
    """Input in which no string of the client holds a control token. `taken`: text whose characters
    cannot be marks, besides those of the input."""
    strings: list[str] = []

    def note(text: str) -> str:
        strings.append(text)
        return text

    _change_strings(given, note, {})
    breaks = {text: places for text in strings if (places := control.breaks(text))}
    if not breaks:
        return given
    letters = {text[i] for text, places in breaks.items() for i in places}
    free = free_marks(control, "\0".join([taken, *strings]), len(letters))
    signs = dict(zip(sorted(letters), free, strict=True))

    def change(text: str) -> str:
        return _replace(text, breaks[text], signs) if text in breaks else text

    return _change_strings(given, change, {mark: char for char, mark in signs.items()})


def with_signs(text: str, signs: Mapping[str, str]) -> str:
    """No sign may hold one of the replaced texts."""
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


def free_marks(control: ControlTokens, text: str, count: int) -> list[str]:
    """Characters that do not occur in `text`, neither literally nor as JSON escapes."""
    present = {*text}
    escaped = {match[0].lower() for match in re.finditer(r"(?i)\\u[0-9a-f]{4}", text)}
    unused = (
        mark
        for mark in map(chr, chain(*MARKS))
        if mark not in present and json.dumps(mark)[1:7] not in escaped and control.keeps(mark)
    )
    found = [*islice(unused, count)]
    if len(found) < count:
        raise BadRequest("the text holds every private character of Unicode", param="messages")
    return found


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


@dataclass(frozen=True)
class Encoded:
    ids: list[int]
    starts: list[int]


@dataclass(frozen=True)
class _Piece:
    """Tokens `first .. last` and characters `start .. stop` between two control tokens."""

    first: int
    last: int
    start: int
    stop: int
    after: int | None
    """Id of the control token before it. `None`: the beginning of the text."""


def spelt(
    fast: Any,
    control: ControlTokens,
    text: str,
    marks: Mapping[str, str],
    found: Sequence[int],
    spans: Sequence[tuple[int, int]],
) -> Encoded:
    """`found`, `spans`: ids and characters of the tokens of the complete tokenizer."""
    own = [i for i, token in enumerate(found) if token in control.content]
    real = [i for i in own if _is_written(text[slice(*spans[i])], control.content[found[i]])]
    pieces = [*_pieces(found, spans, real, len(text))]
    where = [piece.start for piece in pieces]
    # an id that the template did not write comes from letters that a normalizer changed
    odd = [spans[i][0] for i in set(own) - set(real)]
    at = [*odd, *(match.start() for match in re.finditer(any_of(marks), text))]
    wanted = [pieces[n] for n in sorted({bisect_right(where, i) - 1 for i in at})]
    starts = [start for start, _ in spans]
    if not wanted:
        return Encoded(list(found), starts)
    spelling = Letters(fast, control, with_signs(text, marks)).encode(wanted)
    made, last = Encoded([], []), 0
    for piece, letters in zip(wanted, spelling, strict=True):
        made.ids.extend([*found[last : piece.first], *letters.ids])
        made.starts.extend([*starts[last : piece.first], *letters.starts])
        last = piece.last
    return Encoded([*made.ids, *found[last:]], [*made.starts, *starts[last:]])


def _is_written(part: str, content: str) -> bool:
    """Whether a part of the text is literally a token, with the white space that it absorbs."""
    return not part.replace(content, "", 1).replace(SPACE_SIGN, " ").strip()


def _pieces(
    found: Sequence[int], spans: Sequence[tuple[int, int]], real: Sequence[int], length: int
) -> Iterator[_Piece]:
    first, start, after = 0, 0, None
    for i in real:
        yield _Piece(first, i, start, spans[i][0], after)
        first, start, after = i + 1, spans[i][1], found[i]
    yield _Piece(first, len(found), start, length, after)


class Letters:
    """The model of a tokenizer (`fast`) without its control tokens, for pieces of `text`."""

    def __init__(self, fast: Any, control: ControlTokens, text: str) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._text = text
        self._model = fast.model
        self._control = control
        self._plain = Tokenizer(fast.model)
        if fast.normalizer is not None:
            self._plain.normalizer = fast.normalizer
        if fast.pre_tokenizer is not None:
            self._plain.pre_tokenizer = fast.pre_tokenizer
        # text after a token that is found after normalising begins differently
        self._anchor, self._normal = free_marks(control, text, 2)
        anchors = [AddedToken(self._anchor, normalized=False), AddedToken(self._normal)]
        self._plain.add_tokens([*control.vocabulary, *anchors])
        kept = [token.content for token in control.vocabulary]
        self._ids = {self._plain.token_to_id(c): fast.token_to_id(c) for c in kept}
        unknown = {token.id for token in fast.model.tokenize(UNKNOWN)}
        self._forbidden = control.content.keys() - unknown

    def encode(self, pieces: Sequence[_Piece]) -> list[Encoded]:
        parts, shifts, length = [], [], 0
        for piece in pieces:
            # the prefix puts a piece after a token; one found after normalising begins its own text
            normal = self._normal * (piece.after in self._control.normalized)
            before = "" if piece.after is None else self._anchor + normal
            parts.append(before + self._text[piece.start : piece.stop])
            length += len(parts[-1])
            shifts.append(piece.stop - length)
        encoding = self._plain.encode("".join(parts), add_special_tokens=False)
        anchor, normal = map(self._plain.token_to_id, (self._anchor, self._normal))
        made = [Encoded([], []) for _ in pieces]
        at = 0 if pieces[0].after is None else -1
        for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in (anchor, normal):
                at += token == anchor
                continue
            ids = self._allow(self._ids.get(token, token))
            made[at].ids.extend(ids)
            made[at].starts.extend([start + shifts[at]] * len(ids))
        return made

    def _allow(self, token: int) -> list[int]:
        """The token, or its letters if the vocabulary itself has a control token."""
        return self._spell(self._model.id_to_token(token)) if token in self._forbidden else [token]

    def _spell(self, piece: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(piece)]
        if self._forbidden.isdisjoint(ids):
            return ids
        # a single sign that is only a control token has no other spelling
        return self._spell(piece[:1]) + self._spell(piece[1:]) if len(piece) > 1 else []
