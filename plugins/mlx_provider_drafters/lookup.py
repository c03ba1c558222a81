"""Prompt lookup: guesses the tokens that followed the same text earlier in prompt or reply.

A longer match gives more drafts: one after `MIN_MATCH_TOKENS` tokens, one more for each further
token. Measured: when files of this project are rewritten as in its history, a pass gives 5.8 tokens
and 96 % of the drafts are accepted. In text without quotations, one of eight passes has drafts, and
40 % are accepted. With always seven drafts: 6.0 tokens a pass, and 16 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_provider.records import DraftRow

from .ngrams import MIN_MATCH_TOKENS, Match, Ngrams

PIECE = 1 << 15
"""Tokens that one call reads, in some milliseconds."""


@dataclass
class Source:
    text: Ngrams = field(default_factory=Ngrams)
    match: Match | None = None


class Lookup:
    """A `Drafting` that computes nothing on the device."""

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
    """Read new tokens of a row. A copy continues as long as the text is the same."""
    own.text.extend(new)
    match = own.match
    if match is not None and own.text.says(match.place, len(new)):
        own.match = Match(match.place + len(new), match.length + len(new))
    else:
        own.match = own.text.longest()


def _drafts(own: Source, count: int) -> Sequence[int]:
    """Up to `count` drafts; a longer match gives more."""
    match = own.match
    if match is None:
        return ()
    return own.text.follows(match.place, min(count, match.length - MIN_MATCH_TOKENS + 1))
