"""How often the drafts of a drafter held: for a row, and for all rows. Imports no mlx.

Trials of drafters that do not pay, or in place of others, within a limit. Imports no mlx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...records.drafter import MOST_DRAFTS
from .costs import Ask, Choice, Kind, Prospects, Step, best_of

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


GOOD = 0.9
"""Assumed acceptance rate in a trial; in place of another drafter, it is `SUREST`."""
TRIED = 1
REFUSED = 8
"""A refused trial is considered again in the next step whose number is a multiple of this: for all
rows in one step, because that costs the host more than its other decisions."""
AWAITED = 2
"""Steps until the result of a trial is known: passes are planned before the last one is read."""
ALLOWANCE = 0.01
"""Share of the time that trials may take."""
SAVED = 6.0
"""Most plain steps in the allowance, also its initial value. Accepted drafts add to it."""


@dataclass
class Trials:
    saved: float = SAVED
    steps: int = 0

    def chosen(
        self,
        rows: Sequence[Sequence[RowOdds | None]],
        prospects: Prospects,
        best: Choice,
        step: Callable[[Kind], Step],
    ) -> list[Ask | None]:
        """A drafter to try first for each row, if it may pay off and the allowance permits. `best`:
        the choice without trials."""
        self._spend((best.seconds - best.step.plain) / best.step.plain)
        due = [
            self._due(row, pick, drafts)
            for row, pick, drafts in zip(rows, best.picks, best.counts, strict=True)
        ]
        if not any(due):
            return [None] * len(rows)
        hopeful = best_of(_hoped(prospects, due, best.counts), step)
        tries = [
            Ask(pick, drafts if instead else min(TRIED, drafts))
            if drafts and pick in tried
            else None
            for pick, drafts, tried, instead in zip(
                hopeful.picks, hopeful.counts, due, best.counts, strict=True
            )
        ]
        pairs = zip(tries, best.counts, strict=True)
        counts = [each.drafts if each else drafts for each, drafts in pairs]
        price = _price(Choice(hopeful.step, hopeful.picks, counts, 0.0), best)
        if not any(tries) or not self._afford(price):
            for row, tried in zip(rows, due, strict=True):
                for odds in (row[source] for source in tried):
                    if odds is not None:
                        odds.rest = REFUSED - self.steps % REFUSED
            return [None] * len(rows)
        for row, ask in zip(rows, tries, strict=True):
            odds = row[ask.source] if ask else None
            if odds is not None:
                odds.rest, odds.pause = AWAITED, min(LONGEST_REST, 2 * odds.pause)
        return tries

    def learn(self, row: RowOdds, held: int) -> None:
        self.saved = min(SAVED, self.saved + held * row.worth)

    def rested(self, odds: Sequence[RowOdds]) -> None:
        self.steps += 1
        self.saved = min(SAVED, self.saved + ALLOWANCE)
        for each in odds:
            each.rest = max(0, each.rest - 1)

    def _due(self, row: Sequence[RowOdds | None], pick: int, drafts: int) -> set[int]:
        return {
            source
            for source, odds in enumerate(row)
            if odds is not None
            and odds.due(self.steps, instead=drafts > 0)
            and not (drafts and source == pick)
        }

    def _spend(self, price: float) -> None:
        """Drafts that are expected to pay off need no allowance and leave no debt."""
        self.saved = max(self.saved - price, min(self.saved, 0.0))

    def _afford(self, price: float) -> bool:
        if self.saved < min(price, SAVED):
            return False
        self.saved -= price
        return True


def _hoped(prospects: Prospects, due: Sequence[set[int]], counts: Sequence[int]) -> Prospects:
    """The chances, with assumed ones for drafters that are tried. `counts`: drafts of others."""
    chances = prospects.chances.copy()
    places = np.arange(1, 1 + chances.shape[2])
    for row, (tried, instead) in enumerate(zip(due, counts, strict=True)):
        for source in tried:
            chances[row, source] = (SUREST if instead else GOOD) ** places
    return Prospects(chances)


def _price(tried: Choice, best: Choice) -> float:
    """Extra time of a step with trials over the best step, in plain steps. If there would be no
    drafts otherwise, this includes the idle time of the device."""
    longer = tried.seconds - best.seconds
    return (longer + (0.0 if any(best.counts) else tried.step.aside)) / best.step.plain
