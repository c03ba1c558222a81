"""Prompt lookup: drafts the tokens that followed the same text earlier in prompt or reply. One
draft after a match of `MIN_MATCH_TOKENS` tokens, one more for each further token. Measured on
rewritten files of this project: 5.8 tokens per pass, 96 % of drafts accepted. Always seven drafts:
6.0 tokens, 16 %. In text without quotations, one pass in eight has drafts, 40 % are accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mlx_provider.records import DraftRow

MIN_MATCH_TOKENS = 3  # most pairs of tokens in prose have another continuation
LONGEST = 32  # tokens; longer matches count as equal
LOOKS = 64  # places that a search compares: the last ones after the same `MIN_MATCH_TOKENS`
FIRST = 1024  # tokens for which a `Text` has room at first
PIECE = 1 << 15  # tokens that one call of `propose` reads: some milliseconds

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the last `length` tokens; the token after it is at `place`."""

    place: int
    length: int


class Text:
    """The tokens of a row so far (`size`), prompt and reply."""

    def __init__(self) -> None:
        self.size = 0
        self._tokens: Tokens = np.empty(FIRST, np.int32)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes

    def extend(self, tokens: Sequence[int]) -> None:
        start, self.size = self.size, self.size + len(tokens)
        if self.size > len(self._tokens):
            more = np.empty(max(self.size, 2 * len(self._tokens)), np.int32)
            more[:start] = self._tokens[:start]
            self._tokens = more
        self._tokens[start : self.size] = tokens

    def says(self, place: int, count: int) -> bool:
        """Whether the `count` tokens from `place` on are the text's last ones."""
        end = self.size
        return bool((self._tokens[place : place + count] == self._tokens[end - count : end]).all())

    def longest(self) -> Match | None:
        """The longest match of the text's end, the newest of several. `None`: all are too short."""
        if self.size < MIN_MATCH_TOKENS:
            return None
        places = np.flatnonzero(self._tokens[: self.size - 1] == self._tokens[self.size - 1]) + 1
        for count in range(2, MIN_MATCH_TOKENS + 1):
            places = places[places >= count]
            places = places[self._tokens[places - count] == self._tokens[self.size - count]]
        places = places[: -LOOKS - 1 : -1]
        if not len(places):
            return None
        back = np.arange(1, LONGEST + 1)
        at = places[:, None] - back
        same = self._tokens[at.clip(0)] == self._tokens[(self.size - back).clip(0)]
        lengths = np.logical_and.accumulate(same & (at >= 0), axis=1).sum(axis=1)
        first = int(lengths.argmax())
        return Match(int(places[first]), int(lengths[first]))

    def follows(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place` on. If the text ends before, these tokens repeat."""
        found: list[int] = self._tokens[place : min(self.size, place + count)].tolist()
        period = len(found)
        return [found[i % period] for i in range(count)]


@dataclass
class Source:
    """What is known of one row: its text, and the match of its end."""

    text: Text = field(default_factory=Text)
    match: Match | None = None


class Lookup:
    """The drafter `lookup`, a `Drafting`."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int] | None]:
        left = PIECE
        found = []
        for row in rows:
            own = row.state = row.state or Source()
            new = row.tokens[own.text.size : own.text.size + left]
            left -= len(new)
            _read(own, new)
            complete = own.text.size == len(row.tokens)
            found.append(_drafts(own, row.wanted) if complete else None)
        return found


def _read(own: Source, new: Sequence[int]) -> None:
    own.text.extend(new)
    match = own.match
    if match is not None and own.text.says(match.place, len(new)):
        own.match = Match(match.place + len(new), match.length + len(new))
    else:
        own.match = own.text.longest()


def _drafts(own: Source, count: int) -> Sequence[int]:
    match = own.match
    if match is None:
        return ()
    return own.text.follows(match.place, min(count, match.length - MIN_MATCH_TOKENS + 1))
