"""Checks whether the first guesses of a drafter are accepted, to detect a useless drafter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_provider.records import DeviceTokens, DraftRow, Unread

log = logging.getLogger(__name__)

TRIED = 500
"""First guesses after which a drafter is judged."""
CHANCE = 0.02
"""Share of them below which it knows nothing of the text."""


@dataclass(frozen=True, eq=False)
class Guess:
    """The last guesses for a row."""

    place: int
    """Number of known tokens before them."""
    unread: Unread | None
    """Unread tokens between these and the guesses."""
    tokens: DeviceTokens

    @classmethod
    def of(cls, row: DraftRow, tokens: DeviceTokens) -> Guess:
        return cls(len(row.tokens), row.unread, tokens)

    def answered(self, tokens: Sequence[int]) -> int | None:
        """The token at the position of the first guess. `None`: not yet known. `tokens`: of the
        row."""
        place = self.place
        if self.unread is not None and self.unread.read is not None:
            place += self.unread.read + 1
        return tokens[place] if place < len(tokens) else None


@dataclass
class Judged:
    name: str
    """Kind and checkpoint of the drafter."""
    tried: int = 0
    guesses: list[tuple[DeviceTokens, int]] = field(default_factory=list)
    """Each guess with the real token, until there are enough."""

    def look(self, guess: Guess | None, tokens: Sequence[int]) -> None:
        """Count a row's last guesses, if the real tokens are known. Warns once if they are accepted
        as rarely as by chance."""
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
