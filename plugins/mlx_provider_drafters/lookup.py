"""Prompt lookup: what followed the same words before, in the prompt or in the reply.

The longer the match, the more is copied: one token after `MIN_MATCH_TOKENS`, one more for each
beyond. Files of this project that are rewritten as they were in its history take a pass for 5.8
tokens, and 96 % of their drafts hold; in text that quotes nothing there are drafts in one pass of
eight, and 40 % hold. All seven at once would be 6.0 tokens a pass, and 16 %.
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
    """Follow a row: what is copied goes on as long as the text says the same."""
    own.text.extend(new)
    match = own.match
    if match is not None and own.text.says(match.place, len(new)):
        own.match = Match(match.place + len(new), match.length + len(new))
    else:
        own.match = own.text.longest()


def _drafts(own: Source, count: int) -> Sequence[int]:
    """The longer the match, the more."""
    match = own.match
    if match is None:
        return ()
    return own.text.follows(match.place, min(count, match.length - MIN_MATCH_TOKENS + 1))
