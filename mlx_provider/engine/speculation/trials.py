"""Trials of drafters that do not pay, or in place of others, within a limit. Imports no mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .asks import Ask
from .choice import Choice, Prospects, best_of
from .costs import Kind, Step
from .odds import LONGEST_REST, SUREST, RowOdds

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
