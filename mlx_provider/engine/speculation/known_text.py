"""Text that a grammar or a forecast knows: whether its drafts are worth their place. Imports no
mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, log1p

from ...records.drafter import MOST_DRAFTS
from .choice import MARGIN
from .costs import DraftCosts, Passes, Seconds
from .odds import HOPE, LASTING, Odds

SELDOM = 0.1
"""How often text that a forecast foretells begins behind another token, before any measurement."""


@dataclass
class KnownText:
    """Statistics of all rows."""

    most: int = MOST_DRAFTS
    costs: DraftCosts = field(default_factory=DraftCosts)
    foretold: Odds = field(default_factory=lambda: Odds(LASTING))
    """Results of tokens that rows' forecasts foretell, whether they are drafts or not."""
    begins: Odds = field(default_factory=lambda: Odds(LASTING))
    """How often text that a forecast foretells begins behind another token."""

    def worthwhile(self, chances: Sequence[float], rows: int, seconds: Seconds) -> int:
        """How many drafts of one row gain more than all rows lose. 0: none.

        chances: of each draft to hold if those before it do; rows: rows of the pass; seconds:
        duration of a pass by the number of its extra tokens.
        """
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
        """Chance of a token that the forecast of a row foretells. `row`: its own results."""
        return row.share(self.foretold.share(HOPE))

    def reads_first(self, row: Odds, rows: int, seconds: Seconds) -> bool:
        """Whether it gains more than all rows lose to read a row's last token before the next pass,
        because foretold text may begin behind it. That saves one pass.

        row: its own results, see `begins`; rows, seconds: see `worthwhile`.
        """
        chance = row.share(self.begins.share(SELDOM))
        aside = self.costs.aside
        return log1p(chance) > rows * (log1p(aside / seconds(0)) + MARGIN)

    def learn_beginning(self, row: Odds, *, begun: bool) -> None:
        """Add a token that a row's forecast has not foretold. `begun`: what follows, it does."""
        row.learn(int(begun), 1)
        self.begins.learn(int(begun), 1)

    def learn_forecast(self, row: Odds, *, right: bool) -> None:
        """Add a token that a row's forecast has foretold."""
        row.learn(int(right), 1)
        self.foretold.learn(int(right), 1)
