"""How often the drafts of a drafter held: for a row, and for all rows. Imports no mlx."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...records.drafter import MOST_DRAFTS

MEMORY = 24
"""Drafts per row that are remembered: few, to react soon to a change in its text."""
LASTING = 200
"""The same for all rows together."""
DOUBTED = 4.0
"""The same once a draft is accepted after many rejected ones."""
BELIEF = 2.0
"""Prior weight of a row, in drafts, at the acceptance rate of other rows."""
HOPE = 0.7
"""Acceptance rate before any measurement."""
SUREST = 0.99
MISSED_PASSES = 3
"""Passes in sequence without an accepted draft, after which a row gets only trials."""
LONGEST_REST = 32
"""Most steps between the trials of a drafter for a row, if the allowance permits."""
FIRST_PAUSE = 8
"""Steps between the first trials of a drafter in place of another one."""
PLACES = 4.0
"""Prior weight, in accepted drafts, of equal rates at all positions."""


@dataclass
class Odds:
    memory: int = MEMORY
    held: float = 0.0
    tried: float = 0.0

    def learn(self, held: int, tried: int) -> None:
        """The first `held` of `tried` drafts were accepted. Drafts after a rejected one do not
        count."""
        kept = (1 - 1 / self.memory) ** tried
        self.held = kept * self.held + held
        self.tried = kept * self.tried + tried

    def doubt(self) -> None:
        kept = min(1.0, DOUBTED / max(self.tried, DOUBTED))
        self.held, self.tried = kept * self.held, kept * self.tried

    def share(self, belief: float) -> float:
        """`belief`: the acceptance rate of other rows."""
        return min(SUREST, (self.held + BELIEF * belief) / (self.tried + BELIEF))


@dataclass
class RowOdds:
    odds: Odds = field(default_factory=Odds)
    missed: int = 0
    rest: int = 0
    """Steps until it may be tried again, if no drafter has drafts for the row."""
    pause: int = FIRST_PAUSE
    """Steps between trials in place of another drafter: more after each one, until its own drafts
    pay."""
    worth: float = 0.0
    """Plain steps that an accepted draft of its present trial saves."""

    @property
    def trusted(self) -> bool:
        return self.missed < MISSED_PASSES

    def due(self, step: int, *, instead: bool) -> bool:
        """`instead`: in place of another drafter. Such trials of all rows fall into the same steps,
        because they may make all rows wait."""
        return step % self.pause == 0 if instead else not self.rest

    def learn(self, held: int, tried: int) -> None:
        if held and not self.trusted:
            self.odds.doubt()  # its text may have changed in kind
            self.pause = FIRST_PAUSE
        self.odds.learn(held, tried)
        self.missed = 0 if held else self.missed + 1
        self.rest = 0 if self.trusted else min(LONGEST_REST, 2 ** (self.missed - MISSED_PASSES))


@dataclass
class SourceOdds:
    """Results of one drafter for all rows."""

    everyone: Odds = field(default_factory=lambda: Odds(LASTING))
    held: list[float] = field(default_factory=lambda: [0.0] * MOST_DRAFTS)
    """Accepted drafts by position."""
    expected: list[float] = field(default_factory=lambda: [0.0] * MOST_DRAFTS)
    """Expected accepted drafts by position, from the acceptance rate of each row."""

    def share(self, row: RowOdds) -> float:
        return row.odds.share(self.everyone.share(HOPE))

    def learn(self, row: RowOdds, drafts: int, held: int) -> None:
        share, tried = self.share(row), min(max(1, drafts), held + 1)
        kept = 1 - 1 / LASTING
        for at in range(min(tried, MOST_DRAFTS)):
            self.expected[at] = kept * self.expected[at] + share
            self.held[at] = kept * self.held[at] + (at < held)
        row.learn(held, tried)
        self.everyone.learn(held, tried)

    def places(self, most: int) -> list[float]:
        """Accepted over expected drafts by position."""
        pairs = zip(self.held[:most], self.expected[:most], strict=True)
        return [(held + PLACES) / (expected + PLACES) for held, expected in pairs]
