"""Tokenizes a rendered text with its hidden strings spelled in letters.

The tokenizer finds the template's control tokens. Text with hidden characters between two of them
is encoded again, by a tokenizer with the same model but no control tokens. A private added token
precedes each such piece, because some tokenizers write a space at the beginning of a text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ....errors import BadRequest
from .control_tokens import SPACE_SIGN, UNKNOWN, ControlTokens
from .joins import any_of
from .marks import free_marks, with_signs


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
    if not wanted:
        return Encoded(list(found), [start for start, _ in spans])
    shown = with_signs(text, marks)
    letters = Letters(fast, control, shown)
    return _joined(found, spans, wanted, letters.encode(shown, wanted))


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


def _joined(
    found: Sequence[int],
    spans: Sequence[tuple[int, int]],
    pieces: Sequence[_Piece],
    spellings: Sequence[Encoded],
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
    def __init__(self, fast: Any, control: ControlTokens, text: str) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._model = fast.model
        self._control = control
        self._plain = Tokenizer(fast.model)
        if fast.normalizer is not None:
            self._plain.normalizer = fast.normalizer
        if fast.pre_tokenizer is not None:
            self._plain.pre_tokenizer = fast.pre_tokenizer
        # text after a token that is found after normalising begins differently
        free = [*islice(filter(control.keeps, free_marks(text)), 2)]
        if len(free) < 2:
            raise BadRequest("the text holds every private character of Unicode", param="messages")
        self._anchor, self._normal = free
        anchors = [AddedToken(self._anchor, normalized=False), AddedToken(self._normal)]
        self._plain.add_tokens([*control.vocabulary, *anchors])
        kept = [token.content for token in control.vocabulary]
        self._ids = {self._plain.token_to_id(c): fast.token_to_id(c) for c in kept}
        self._anchor_ids = [self._plain.token_to_id(c) for c in (self._anchor, self._normal)]
        unknown = {token.id for token in fast.model.tokenize(UNKNOWN)}
        self._forbidden = control.content.keys() - unknown

    def encode(self, text: str, pieces: Sequence[_Piece]) -> list[Encoded]:
        parts, shifts, length = [], [], 0
        for piece in pieces:
            parts.append(self._before(piece) + text[piece.start : piece.stop])
            length += len(parts[-1])
            shifts.append(piece.stop - length)
        encoding = self._plain.encode("".join(parts), add_special_tokens=False)
        made = [Encoded([], []) for _ in pieces]
        at = 0 if pieces[0].after is None else -1
        for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._anchor_ids:
                at += token == self._anchor_ids[0]
                continue
            ids = self._allowed(self._ids.get(token, token))
            made[at].ids.extend(ids)
            made[at].starts.extend([start + shifts[at]] * len(ids))
        return made

    def _before(self, piece: _Piece) -> str:
        """The prefix that puts a piece after a token. One found after normalising begins its own
        text."""
        if piece.after is None:
            return ""
        return self._anchor + self._normal * (piece.after in self._control.normalized)

    def _allowed(self, token: int) -> list[int]:
        """The token, or its letters if the vocabulary itself has a control token."""
        return self._parted(self._model.id_to_token(token)) if token in self._forbidden else [token]

    def _parted(self, piece: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(piece)]
        if self._forbidden.isdisjoint(ids):
            return ids
        # a single sign that is only a control token has no other spelling
        return self._parted(piece[:1]) + self._parted(piece[1:]) if len(piece) > 1 else []
