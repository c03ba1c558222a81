"""Prompt lookup: drafts the tokens that followed the same text earlier in prompt or reply. One
draft after a match of `MIN_MATCH_TOKENS` tokens, one more for each further token. Measured on
rewritten files of this project: 5.8 tokens a pass, 96 % of drafts accepted; always seven drafts:
6.0 tokens and 16 %. In text without quotations, one of eight passes has drafts, 40 % accepted.

Earlier occurrences are chains of positions by hashed n-grams, as in deflate (RFC 1951, section 4):
a bucket has the last position of its n-grams, each position refers to the previous one in its
bucket. 8 bytes per token; the cost per token does not depend on the text's length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mlx_provider.records import DraftRow


class ForcedText:
    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        return [() for _ in rows]


MIN_MATCH_TOKENS = 3
"""Size of the n-grams. Most pairs in prose have another continuation."""
LONGEST = 32
"""Longer matches count as equal."""
LOOKS = 64
"""Positions of a bucket that a search tests, the last ones."""
BITS = 16
FIRST = 1024

Tokens = NDArray[np.int32]
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D], np.uint32)  # odd, as in xxHash


@dataclass(frozen=True)
class Match:
    place: int
    """Position of the token after the earlier occurrence."""
    length: int


class Ngrams:
    def __init__(self) -> None:
        self.size = 0
        self._tokens: Tokens = np.empty(FIRST, np.int32)
        self._before: Tokens = np.empty(FIRST, np.int32)
        """Previous position in the same bucket; -1: none."""
        self._last: Tokens = np.full(1 << BITS, -1, np.int32)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._before.nbytes + self._last.nbytes

    def extend(self, tokens: Sequence[int]) -> None:
        start, self.size = self.size, self.size + len(tokens)
        if self.size > len(self._tokens):
            self._tokens = _grown(self._tokens, self.size)
            self._before = _grown(self._before, self.size)
        self._tokens[start : self.size] = tokens
        if self.size > max(start, MIN_MATCH_TOKENS):
            self._chain(max(start, MIN_MATCH_TOKENS))

    def says(self, place: int, count: int) -> bool:
        end = self.size
        return bool((self._tokens[place : place + count] == self._tokens[end - count : end]).all())

    def longest(self) -> Match | None:
        places = np.array(list(self._chained()), np.int32)
        if not len(places):
            return None
        back = np.arange(1, LONGEST + 1)
        at = places[:, None] - back
        same = self._tokens[at.clip(0)] == self._tokens[(self.size - back).clip(0)]
        lengths = np.logical_and.accumulate(same & (at >= 0), axis=1).sum(axis=1)
        first = int(lengths.argmax())
        length = int(lengths[first])
        return Match(int(places[first]), length) if length >= MIN_MATCH_TOKENS else None

    def follows(self, place: int, count: int) -> list[int]:
        """Beyond the end of the text, tokens repeat."""
        found: list[int] = self._tokens[place : min(self.size, place + count)].tolist()
        period = len(found)
        return [found[i % period] for i in range(count)]

    def _chain(self, start: int) -> None:
        text = self._tokens[start - MIN_MATCH_TOKENS : self.size - 1].view(np.uint32)
        places = np.arange(start, self.size, dtype=np.int32)
        buckets = _buckets(text, len(places))
        order = np.argsort(buckets, kind="stable")
        places, buckets = places[order], buckets[order]
        again = buckets[1:] == buckets[:-1]
        before = self._last[buckets]
        before[1:][again] = places[:-1][again]
        self._before[places] = before
        last = np.append(~again, True)
        self._last[buckets[last]] = places[last]

    def _chained(self) -> Iterator[int]:
        if self.size < MIN_MATCH_TOKENS:
            return
        end = self._tokens[self.size - MIN_MATCH_TOKENS : self.size].view(np.uint32)
        place = int(self._last[_buckets(end, 1)[0]])
        for _ in range(LOOKS):
            if place < 0:
                return
            yield place
            place = int(self._before[place])


def _buckets(text: NDArray[np.uint32], count: int) -> NDArray[np.uint16]:
    mixed = text[:count] * _FACTORS[0]
    for i in range(1, MIN_MATCH_TOKENS):
        mixed ^= text[i : i + count] * _FACTORS[i]
    mixed *= _FACTORS[0]
    buckets: NDArray[np.uint16] = (mixed >> np.uint32(32 - BITS)).astype(np.uint16)
    return buckets


def _grown(array: Tokens, size: int) -> Tokens:
    more = np.empty(max(size, 2 * len(array)), np.int32)
    more[: len(array)] = array
    return more


PIECE = 1 << 15
"""Tokens per call: some milliseconds."""


@dataclass
class Source:
    text: Ngrams = field(default_factory=Ngrams)
    match: Match | None = None


class Lookup:
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
