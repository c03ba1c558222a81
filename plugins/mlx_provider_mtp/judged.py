"""Whether the first guesses of a drafter hold, to tell one that is of no use."""

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
    """Known tokens before them."""
    unread: Unread | None
    """Unread ones between."""
    tokens: DeviceTokens

    @classmethod
    def of(cls, row: DraftRow, tokens: DeviceTokens) -> Guess:
        return cls(len(row.tokens), row.unread, tokens)

    def answered(self, tokens: Sequence[int]) -> int | None:
        """What came in the place of the first one. `None`: nothing yet. `tokens`: of the row."""
        place = self.place
        if self.unread is not None and self.unread.read is not None:
            place += self.unread.read + 1
        return tokens[place] if place < len(tokens) else None


@dataclass
class Judged:
    name: str
    """What the drafter is, and of which checkpoint."""
    tried: int = 0
    guesses: list[tuple[DeviceTokens, int]] = field(default_factory=list)
    """Until there are enough: each guess, and the token that came."""

    def look(self, guess: Guess | None, tokens: Sequence[int]) -> None:
        """Count a row's last guesses, if it is known what came; says so once where they hold as
        seldom as by chance."""
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
