"""When drafts of predicted text (by a grammar or a forecast) pay. Imports no mlx.

Decides how many drafts pay in a pass, and which drafter gives them. Imports no mlx.

A draft costs the extra time of a wider pass and saves a whole pass if it is accepted. `costs` knows
the measured times, `odds` each row's acceptance by drafter. A drafter that does not pay for a row
is tried again later (`trials`). Drafters are named by their index, the best first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, log1p

import numpy as np

from ...records.drafter import MOST_DRAFTS
from .costs import (
    KNOWN_TEXT,
    MARGIN,
    Asks,
    DraftCosts,
    Floats,
    Kind,
    Passes,
    Prospects,
    Seconds,
    Step,
    best_of,
    fastest,
)
from .trials import FIRST_PAUSE, HOPE, LASTING, SUREST, Odds, RowOdds, SourceOdds, Trials

SELDOM = 0.1
"""Initial rate at which predicted text begins after a token that was not predicted."""


@dataclass
class KnownText:
    most: int = MOST_DRAFTS
    costs: DraftCosts = field(default_factory=DraftCosts)
    foretold: Odds = field(default_factory=lambda: Odds(LASTING))
    """Acceptance of predicted tokens, whether they were drafts or not."""
    begins: Odds = field(default_factory=lambda: Odds(LASTING))
    """How often predicted text begins after a token that was not predicted."""

    def worthwhile(self, chances: Sequence[float], rows: int, seconds: Seconds) -> int:
        """How many drafts of one row gain more than all rows lose. 0: none. `chances`: acceptance
        of each draft if those before it are accepted; `rows`: rows of the pass; `seconds`: duration
        of a pass by the number of its extra tokens."""
        step = self.costs.step(rows, Passes(seconds), self.most)
        best, most = 0, 0.0
        held, tokens = 1.0, 1.0
        for drafts, chance in enumerate(chances[: self.most], 1):
            held *= chance
            tokens += held
            gained = log(tokens) - rows * (log(step.took(drafts, 0) / step.plain) + MARGIN)
            if gained > most:
                best, most = drafts, gained
        return best

    def foresees(self, row: Odds) -> float:
        return row.share(self.foretold.share(HOPE))

    def reads_first(self, row: Odds, rows: int, seconds: Seconds) -> bool:
        """Whether reading a row's last token before the next pass gains more than all rows lose,
        because predicted text may begin after it. That saves one pass. `row`: its own results, see
        `begins`; rows, `seconds`: see `worthwhile`."""
        chance = row.share(self.begins.share(SELDOM))
        aside = self.costs.aside
        return log1p(chance) > rows * (log1p(aside / seconds(0)) + MARGIN)

    def learn_beginning(self, row: Odds, *, begun: bool) -> None:
        """Count a token that the forecast did not predict. `begun`: it predicts the next one."""
        row.learn(int(begun), 1)
        self.begins.learn(int(begun), 1)

    def learn_forecast(self, row: Odds, *, right: bool) -> None:
        row.learn(int(right), 1)
        self.foretold.learn(int(right), 1)


@dataclass
class Policy:
    most: int = MOST_DRAFTS
    beside_prompts: bool = False
    """Whether a step that prefills may have drafts. They delay the first token of the prompt."""
    sources: dict[int, SourceOdds] = field(default_factory=lambda: defaultdict(SourceOdds))
    costs: dict[Kind, DraftCosts] = field(default_factory=lambda: defaultdict(DraftCosts))
    known_text: KnownText = field(default_factory=KnownText)
    trials: Trials = field(default_factory=Trials)
    _rests: bool = False
    """The last decision was for no drafts. It holds until a drafter of a row may be tried."""

    def __post_init__(self) -> None:
        self.known_text.most = self.most
        self.costs[KNOWN_TEXT] = self.known_text.costs

    def wanted(
        self, rows: Sequence[Sequence[RowOdds | None]], others: int, seconds: Seconds
    ) -> list[Asks]:
        """The drafters to ask for each row, and for how many drafts. `rows`: of each drafter,
        `None` if it cannot draft for the row; `others`: rows without drafters; `seconds`: duration
        of a pass by the number of its extra tokens."""
        if self._rests and all(odds.rest for row in rows for odds in row if odds is not None):
            return [()] * len(rows)
        count, passes = len(rows) + others, Passes(seconds)

        def step(kind: Kind) -> Step:
            return (self.costs[kind] if kind else DraftCosts()).step(count, passes, self.most)

        prospects = Prospects(self._chances(rows))
        best = best_of(prospects, step)
        tried = self.trials.chosen(rows, prospects, best, step)
        asks: list[Asks] = []
        picks = zip(rows, best.picks, best.counts, tried, strict=True)
        for at, (row, pick, drafts, trial) in enumerate(picks):
            regular = prospects.asks(at, pick, drafts) if drafts else ()
            if trial:
                regular = (trial, *(ask for ask in regular if ask.source != trial.source))
            asks.append(regular)
            for source, odds in enumerate(row):
                if odds is not None and drafts and source == pick:
                    odds.pause = FIRST_PAUSE
                if odds is not None and any(source == ask.source for ask in asks[-1]):
                    odds.worth = 1 / count
        self._rests = not any(asks)
        return asks

    def expected_gain(
        self, seconds: Seconds, share: float, *, per_draft: float = 0.0
    ) -> tuple[int, float]:
        """Best number of drafts per pass for a single row (0: none), and the speed-up. `seconds`:
        duration of a pass by its number of drafts; `share`: assumed acceptance rate; `per_draft`:
        seconds of one guess."""
        held, step = min(SUREST, share), DraftCosts(per_draft).step(1, Passes(seconds), self.most)
        chances = np.array([[[held**each for each in range(1, self.most + 1)]]])
        (drafts,) = fastest(Prospects(chances), np.zeros(1, np.int_), step).counts
        tokens = sum(held**each for each in range(drafts + 1))
        return drafts, tokens * step.plain / step.took(drafts, drafts)

    def rested(self, rows: Sequence[Sequence[RowOdds | None]]) -> None:
        for costs in self.costs.values():
            costs.forget()
        self.trials.rested([each for row in rows for each in row if each is not None])

    def learn(self, source: int, row: RowOdds, drafts: int, held: int) -> None:
        """0 drafts: the drafter had none."""
        self.sources[source].learn(row, drafts, held)
        self.trials.learn(row, held)

    def _chances(self, rows: Sequence[Sequence[RowOdds | None]]) -> Floats:
        """A drafter that is not trusted for a row is not asked."""
        sources = [self.sources[at] for at in range(max(map(len, rows), default=0))]
        beliefs = [source.everyone.share(HOPE) for source in sources]
        shares = np.zeros((len(rows), len(sources)))
        for at, row in enumerate(rows):
            for source, odds in enumerate(row):
                if odds is not None and odds.trusted:
                    shares[at, source] = odds.odds.share(beliefs[source])
        places = np.array([source.places(self.most) for source in sources])
        each = np.minimum(SUREST, shares[..., None] * places.reshape(len(sources), self.most))
        return np.cumprod(each, axis=2)
