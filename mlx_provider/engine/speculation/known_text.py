"""When drafts of predicted text (by a grammar or a forecast) pay. Imports no mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, log1p

from ...records.drafter import MOST_DRAFTS
from .choice import MARGIN
from .costs import DraftCosts, Passes, Seconds
from .odds import HOPE, LASTING, Odds

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
