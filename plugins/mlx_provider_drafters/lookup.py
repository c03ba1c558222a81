"""Prompt lookup: drafts the tokens that followed the same text earlier in prompt or reply. One
draft after a match of `MIN_MATCH_TOKENS` tokens, one more for each further token. Measured on
rewritten files of this project: 5.8 tokens a pass, 96 % of drafts accepted; always seven drafts:
6.0 tokens and 16 %. In text without quotations, one of eight passes has drafts, 40 % accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_provider.records import DraftRow

from .ngrams import MIN_MATCH_TOKENS, Match, Ngrams

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
    """Copies of a row continue as long as the text is the same."""
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
