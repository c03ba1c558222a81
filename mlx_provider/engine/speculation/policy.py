"""Decides how many drafts pay in a pass, and which drafter gives them. Imports no mlx.

A draft costs the extra time of a wider pass and saves a whole pass if it is accepted. `costs` knows
the measured times, `RowAcceptance` how many drafts of each drafter a row accepts. A drafter that
does not pay for a row, or might replace another, is tried again within an allowance (`Trials`).
Drafters are named by their index, the best first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log, log1p

import numpy as np

from ...records.extensions import MOST_DRAFTS
from .costs import (
    KNOWN_TEXT,
    MARGIN,
    Ask,
    Asks,
    Choice,
    DraftCosts,
    ExpectedGain,
    Floats,
    Kind,
    Passes,
    Seconds,
    Step,
    best_of,
    fastest,
)

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
SELDOM = 0.1
"""Initial rate at which predicted text begins after a token that was not predicted."""


@dataclass
class AcceptanceRate:
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
class RowAcceptance:
    odds: AcceptanceRate = field(default_factory=AcceptanceRate)
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
class DrafterAcceptance:
    everyone: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(LASTING))
    held: list[float] = field(default_factory=lambda: [0.0] * MOST_DRAFTS)
    """Accepted drafts by position."""
    expected: list[float] = field(default_factory=lambda: [0.0] * MOST_DRAFTS)
    """Expected accepted drafts by position, from the acceptance rate of each row."""

    def share(self, row: RowAcceptance) -> float:
        return row.odds.share(self.everyone.share(HOPE))

    def learn(self, row: RowAcceptance, drafts: int, held: int) -> None:
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


@dataclass
class Trials:
    saved: float = SAVED
    steps: int = 0

    def chosen(
        self,
        rows: Sequence[Sequence[RowAcceptance | None]],
        gain: ExpectedGain,
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
        hopeful = best_of(_hoped(gain, due, best.counts), step)
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

    def learn(self, row: RowAcceptance, held: int) -> None:
        self.saved = min(SAVED, self.saved + held * row.worth)

    def rested(self, odds: Sequence[RowAcceptance]) -> None:
        self.steps += 1
        self.saved = min(SAVED, self.saved + ALLOWANCE)
        for each in odds:
            each.rest = max(0, each.rest - 1)

    def _due(self, row: Sequence[RowAcceptance | None], pick: int, drafts: int) -> set[int]:
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


def _hoped(gain: ExpectedGain, due: Sequence[set[int]], counts: Sequence[int]) -> ExpectedGain:
    """The chances, with assumed ones for drafters that are tried. `counts`: drafts of others."""
    chances = gain.chances.copy()
    places = np.arange(1, 1 + chances.shape[2])
    for row, (tried, instead) in enumerate(zip(due, counts, strict=True)):
        for source in tried:
            chances[row, source] = (SUREST if instead else GOOD) ** places
    return ExpectedGain(chances)


def _price(tried: Choice, best: Choice) -> float:
    """Extra time of a step with trials over the best step, in plain steps. If there would be no
    drafts otherwise, this includes the idle time of the device."""
    longer = tried.seconds - best.seconds
    return (longer + (0.0 if any(best.counts) else tried.step.aside)) / best.step.plain


@dataclass
class KnownText:
    most: int = MOST_DRAFTS
    costs: DraftCosts = field(default_factory=DraftCosts)
    foretold: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(LASTING))
    """Acceptance of predicted tokens, whether they were drafts or not."""
    begins: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(LASTING))
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

    def foresees(self, row: AcceptanceRate) -> float:
        return row.share(self.foretold.share(HOPE))

    def reads_first(self, row: AcceptanceRate, rows: int, seconds: Seconds) -> bool:
        """Whether reading a row's last token before the next pass gains more than all rows lose,
        because predicted text may begin after it. That saves one pass. `row`: its own results, see
        `begins`; rows, `seconds`: see `worthwhile`."""
        chance = row.share(self.begins.share(SELDOM))
        aside = self.costs.aside
        return log1p(chance) > rows * (log1p(aside / seconds(0)) + MARGIN)

    def learn_beginning(self, row: AcceptanceRate, *, begun: bool) -> None:
        """Count a token that the forecast did not predict. `begun`: it predicts the next one."""
        row.learn(int(begun), 1)
        self.begins.learn(int(begun), 1)

    def learn_forecast(self, row: AcceptanceRate, *, right: bool) -> None:
        row.learn(int(right), 1)
        self.foretold.learn(int(right), 1)


@dataclass
class Policy:
    most: int = MOST_DRAFTS
    beside_prompts: bool = False
    """Whether a step that prefills may have drafts. They delay the first token of the prompt."""
    sources: dict[int, DrafterAcceptance] = field(
        default_factory=lambda: defaultdict(DrafterAcceptance)
    )
    costs: dict[Kind, DraftCosts] = field(default_factory=lambda: defaultdict(DraftCosts))
    known_text: KnownText = field(default_factory=KnownText)
    trials: Trials = field(default_factory=Trials)
    _rests: bool = False
    """The last decision was for no drafts. It holds until a drafter of a row may be tried."""

    def __post_init__(self) -> None:
        self.known_text.most = self.most
        self.costs[KNOWN_TEXT] = self.known_text.costs

    def wanted(
        self, rows: Sequence[Sequence[RowAcceptance | None]], others: int, seconds: Seconds
    ) -> list[Asks]:
        """The drafters to ask for each row, and for how many drafts. `rows`: of each drafter,
        `None` if it cannot draft for the row; `others`: rows without drafters; `seconds`: duration
        of a pass by the number of its extra tokens."""
        if self._rests and all(odds.rest for row in rows for odds in row if odds is not None):
            return [()] * len(rows)
        count, passes = len(rows) + others, Passes(seconds)

        def step(kind: Kind) -> Step:
            return (self.costs[kind] if kind else DraftCosts()).step(count, passes, self.most)

        gain = ExpectedGain(self._chances(rows))
        best = best_of(gain, step)
        tried = self.trials.chosen(rows, gain, best, step)
        asks: list[Asks] = []
        picks = zip(rows, best.picks, best.counts, tried, strict=True)
        for at, (row, pick, drafts, trial) in enumerate(picks):
            regular = gain.asks(at, pick, drafts) if drafts else ()
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
        (drafts,) = fastest(ExpectedGain(chances), np.zeros(1, np.int_), step).counts
        tokens = sum(held**each for each in range(drafts + 1))
        return drafts, tokens * step.plain / step.took(drafts, drafts)

    def rested(self, rows: Sequence[Sequence[RowAcceptance | None]]) -> None:
        for costs in self.costs.values():
            costs.forget()
        self.trials.rested([each for row in rows for each in row if each is not None])

    def learn(self, source: int, row: RowAcceptance, drafts: int, held: int) -> None:
        """0 drafts: the drafter had none."""
        self.sources[source].learn(row, drafts, held)
        self.trials.learn(row, held)

    def _chances(self, rows: Sequence[Sequence[RowAcceptance | None]]) -> Floats:
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
