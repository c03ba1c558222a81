"""Measures the acceptance rate of first guesses, to detect a useless drafter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_provider.records import DeviceTokens, DraftRow, Unread

log = logging.getLogger(__name__)

TRIED = 500
CHANCE = 0.02
"""Acceptance rate below which a drafter is useless."""


@dataclass(frozen=True, eq=False)
class Guess:
    place: int
    unread: Unread | None
    tokens: DeviceTokens

    @classmethod
    def of(cls, row: DraftRow, tokens: DeviceTokens) -> Guess:
        return cls(len(row.tokens), row.unread, tokens)

    def answered(self, tokens: Sequence[int]) -> int | None:
        """The real token at the position of the first guess. `None`: not yet known."""
        place = self.place
        if self.unread is not None and self.unread.read is not None:
            place += self.unread.read + 1
        return tokens[place] if place < len(tokens) else None


@dataclass
class Judged:
    name: str
    tried: int = 0
    guesses: list[tuple[DeviceTokens, int]] = field(default_factory=list)
    """(guess, real token), until there are `TRIED`."""

    def look(self, guess: Guess | None, tokens: Sequence[int]) -> None:
        """Count a row's last guesses, if the real tokens are known. Warns once."""
        if guess is None or (token := guess.answered(tokens)) is None:
            return
        self.tried += 1
        if self.tried > TRIED:
            return
        self.guesses.append((guess.tokens.first(1), token))
        if self.tried < TRIED:
            return
        held = sum(first[0] == came for first, came in self.guesses)
        self.guesses.clear()
        if held < CHANCE * TRIED:
            log.warning(
                "%s drafts at chance: %d of %d first guesses held; it was not "
                "trained, or not with these weights. Set drafter: off, or another one",
                self.name,
                held,
                TRIED,
            )
