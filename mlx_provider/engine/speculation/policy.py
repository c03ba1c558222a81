"""Decides how many drafts are worth their place in a pass, and which drafter gives them. Imports no
mlx.

A draft costs the extra time of a wider pass and saves a whole pass if it holds. The cost comes from
the calibrated curve and from the measured time of passes with drafts of the same drafters, the
benefit from the acceptance of each row's last drafts of each drafter. A drafter that does not pay
for a row is tried again after a number of steps, within an allowance.

A drafter is named by its place among those of the model, the best first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import accumulate, combinations
from math import log, log1p
from typing import NamedTuple

from .odds import (
    FIRST_PAUSE,
    HOPE,
    LASTING,
    LONGEST_REST,
    MOST_DRAFTS,
    SUREST,
    Odds,
    RowOdds,
    SourceOdds,
)

MARGIN = log(1.08)
"""Least expected gain, as the logarithm of a rate, because the estimates are not exact."""
PACE_SHARE = 0.75
"""Least share of its pace that each row keeps, however much drafts help other rows."""
SELDOM = 0.1
"""The same for what a forecast foretells to begin behind a token that it has not foretold."""
GOOD = 0.9
"""Assumed acceptance rate of a row that is tried; in the place of another drafter, it is
`SUREST`."""
TRIED = 1
"""Drafts of a row in a trial. More would show little more."""
REFUSED = 8
"""Steps until a trial that would not pay off, or that the allowance does not permit, is considered
again: to consider it costs the host more than all else that it decides in a step."""
AWAITED = 2
"""Steps until the result of a trial is known, because passes are planned before the last one is
read."""
ALLOWANCE = 0.01
"""Share of the time that trials may take."""
SAVED = 6.0
"""Most plain steps that the allowance can hold, also its initial value. Accepted drafts add to
it."""
DECAY = 0.8
"""Weight of the old seconds at each new measurement."""
SPIKE = 3.0
"""A measurement above this multiple of the known value is a disturbance."""
RISE = 1.5
"""The same for host time, which other work disturbs more."""
QUICK = 0.7
"""Weight of the old value for passes with drafts at each new measurement."""
FORGOTTEN = 0.9998
"""Decay of measurements per step, because they become out of date."""
KNOWN = -1
"""In the place of a drafter: text that a grammar or a forecast knows."""
LEAST_PASS_FACTOR = 0.1
"""Least factor on the expected duration of a pass with drafts. If kernels run while they are
launched, most of the pass is over by then."""


class Ask(NamedTuple):
    """A drafter that should guess for a row."""

    source: int
    drafts: int


Asks = tuple[Ask, ...]
"""The drafters of a row in one step. The next one is asked if the one before has no guess."""
Kind = frozenset[int]
"""The drafters that give the drafts of one pass."""
Chances = Sequence[Sequence[float]]
"""Of a row's drafts by drafter. None: the drafter is not asked."""


@dataclass
class Costs:
    """What drafts of one kind were measured to take."""

    per_draft: float = 0.0
    """Seconds of one drafting round."""
    aside: float = 0.0
    """Seconds that the device idles in a step with drafts, because tokens are read first."""
    slower: dict[int, float] = field(default_factory=dict)
    """Measured over expected duration of passes, by the bit length of their number of drafts."""

    def factor(self, bits: int) -> float:
        """Of the measured passes with the most drafts, up to this number. 1: none."""
        return next((self.slower[n] for n in range(bits, 0, -1) if n in self.slower), 1.0)

    def forget(self) -> None:
        """Count a step."""
        self.aside *= FORGOTTEN
        self.per_draft *= FORGOTTEN
        for bits, times in self.slower.items():
            self.slower[bits] = 1 + FORGOTTEN * (times - 1)


@dataclass(frozen=True)
class Step:
    """Costs of a step with drafts."""

    rows: int
    """Rows, with or without drafts."""
    seconds: Callable[[int], float]
    """Seconds of a pass with this many drafts."""
    aside: float
    per_draft: float

    @property
    def plain(self) -> float:
        return self.seconds(0)

    def took(self, drafts: int, rounds: int) -> float:
        """Seconds of a step with `drafts` in total, and at most `rounds` for one row."""
        if not drafts:
            return self.plain
        return self.seconds(drafts) + self.aside + self.per_draft * rounds


@dataclass(frozen=True)
class Choice:
    """The drafters of some rows in one step."""

    step: Step
    picks: Sequence[int]
    """A drafter for each row. Without drafts, it has no meaning."""
    counts: Sequence[int]
    gain: float
    """Logarithm of the product of all rows' rates, over that without drafts."""

    @property
    def seconds(self) -> float:
        """Expected duration of the step."""
        return self.step.took(sum(self.counts), max(self.counts, default=0))


@dataclass
class Policy:
    """Statistics of all rows."""

    most: int = MOST_DRAFTS
    beside_prompts: bool = False
    """Whether a step that prefills may have drafts. They delay the first token of the prompt."""
    sources: dict[int, SourceOdds] = field(default_factory=lambda: defaultdict(SourceOdds))
    costs: dict[Kind, Costs] = field(default_factory=lambda: defaultdict(Costs))
    foretold: Odds = field(default_factory=lambda: Odds(LASTING))
    """Results of tokens that rows' forecasts foretell, whether they are drafts or not."""
    begins: Odds = field(default_factory=lambda: Odds(LASTING))
    """How often text that a forecast foretells begins behind another token."""
    saved: float = SAVED
    """Allowance for trials, in plain steps."""
    steps: int = 0

    def wanted(
        self,
        rows: Sequence[Sequence[RowOdds | None]],
        others: int,
        seconds: Callable[[int], float],
    ) -> list[Asks]:
        """The drafters to ask for each row, and for how many drafts, that make the rows fastest.

        rows: of each drafter, `None` if it cannot draft for the row; others: rows without drafters;
        seconds: duration of a pass by the number of its extra tokens.
        """
        count = len(rows) + others
        chances = self._chances(rows)
        best = self._best(chances, count, seconds)
        tried = self._trials(rows, chances, best, count, seconds)
        asks: list[Asks] = []
        for row, own, pick, drafts, trial in zip(
            rows, chances, best.picks, best.counts, tried, strict=True
        ):
            regular = _with_others(own, pick, drafts) if drafts else ()
            if trial:
                regular = (trial, *(ask for ask in regular if ask.source != trial.source))
            asks.append(regular)
            for source, odds in enumerate(row):
                if odds is not None and drafts and source == pick:
                    odds.pause = FIRST_PAUSE
                if odds is not None and any(source == ask.source for ask in asks[-1]):
                    odds.worth = 1 / count
        return asks

    def promised(
        self, seconds: Callable[[int], float], share: float, *, per_draft: float = 0.0
    ) -> tuple[int, float]:
        """Expected effect of drafts on a single row: the best number per pass (0: none), and the
        speed-up.

        seconds: duration of a pass by its number of drafts; share: assumed acceptance rate;
        per_draft: seconds of one guess.
        """
        held, step = min(SUREST, share), Step(1, seconds, 0.0, per_draft)
        (drafts,), _ = _fastest([[held**each for each in range(1, self.most + 1)]], step)
        tokens = sum(held**each for each in range(drafts + 1))
        return drafts, tokens * step.plain / step.took(drafts, drafts)

    def worthwhile(
        self, chances: Sequence[float], rows: int, seconds: Callable[[int], float]
    ) -> int:
        """How many drafts of one row gain more than all rows lose. 0: none.

        chances: of each draft to hold if those before it do; rows: rows of the pass; seconds:
        duration of a pass by the number of its extra tokens.
        """
        known = self.costs[KNOWN_TEXT]
        step = Step(rows, self._measured(known, rows, seconds), known.aside, 0.0)
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

    def reads_first(self, row: Odds, rows: int, seconds: Callable[[int], float]) -> bool:
        """Whether it gains more than all rows lose to read a row's last token before the next pass,
        because foretold text may begin behind it. That saves one pass.

        row: its own results, see `begins`; rows, seconds: see `worthwhile`.
        """
        chance = row.share(self.begins.share(SELDOM))
        aside = self.costs[KNOWN_TEXT].aside
        return log1p(chance) > rows * (log1p(aside / seconds(0)) + MARGIN)

    def learn_beginning(self, row: Odds, *, begun: bool) -> None:
        """Add a token that a row's forecast has not foretold. `begun`: what follows, it does."""
        row.learn(int(begun), 1)
        self.begins.learn(int(begun), 1)

    def learn_forecast(self, row: Odds, *, right: bool) -> None:
        """Add a token that a row's forecast has foretold."""
        row.learn(int(right), 1)
        self.foretold.learn(int(right), 1)

    def _chances(self, rows: Sequence[Sequence[RowOdds | None]]) -> list[list[Sequence[float]]]:
        """Of each draft of a drafter that is trusted to hold with those before it."""
        sources = [self.sources[at] for at in range(max(map(len, rows), default=0))]
        places = [source.places(self.most) for source in sources]
        beliefs = [source.everyone.share(HOPE) for source in sources]
        return [
            [
                _cumulative(odds.odds.share(beliefs[at]), places[at])
                if odds is not None and odds.trusted
                else ()
                for at, odds in enumerate(row)
            ]
            for row in rows
        ]

    def _best(
        self, chances: Sequence[Chances], rows: int, seconds: Callable[[int], float]
    ) -> Choice:
        """The drafters and drafts that maximise the product of all rows' rates, if the gain is
        sufficient."""
        none = Costs(), [0] * len(chances)
        best = Choice(self._step(none[0], rows, seconds), none[1], none[1], rows * MARGIN)
        able = sorted({at for row in chances for at, own in enumerate(row) if own})
        for kind in _kinds(able):
            picks = [_likeliest(row, kind) for row in chances]
            if len({pick for pick in picks if pick is not None}) < len(kind):
                continue  # fewer drafters are enough
            step = self._step(self.costs[frozenset(kind)], rows, seconds)
            own = [
                () if pick is None else row[pick] for row, pick in zip(chances, picks, strict=True)
            ]
            counts, gain = _fastest(own, step)
            if gain > best.gain:
                best = Choice(step, [pick or 0 for pick in picks], counts, gain)
        return best

    def _trials(
        self,
        rows: Sequence[Sequence[RowOdds | None]],
        chances: Sequence[Chances],
        best: Choice,
        count: int,
        seconds: Callable[[int], float],
    ) -> list[Ask | None]:
        """A drafter to try first for each row, if it may pay off and the allowance permits."""
        self._spend((best.seconds - best.step.plain) / best.step.plain)
        none: list[Ask | None] = [None] * len(rows)
        due = [
            {
                source
                for source, odds in enumerate(row)
                if odds is not None
                and odds.due(self.steps, instead=drafts > 0)
                and not (drafts and source == pick)
            }
            for row, pick, drafts in zip(rows, best.picks, best.counts, strict=True)
        ]
        if not any(due):
            return none
        good, best_of_all = (
            [hope**each for each in range(1, self.most + 1)] for hope in (GOOD, SUREST)
        )
        hoped = [
            [
                (best_of_all if instead else good) if source in tried else own
                for source, own in enumerate(row)
            ]
            for row, tried, instead in zip(chances, due, best.counts, strict=True)
        ]
        hopeful = self._best(hoped, count, seconds)
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
                        odds.rest = REFUSED
            return none
        for row, ask in zip(rows, tries, strict=True):
            odds = row[ask.source] if ask else None
            if odds is not None:
                odds.rest, odds.pause = AWAITED, min(LONGEST_REST, 2 * odds.pause)
        return tries

    def _spend(self, price: float) -> None:
        """Reduce the allowance. Drafts that are expected to pay off need none and leave no debt."""
        self.saved = max(self.saved - price, min(self.saved, 0.0))

    def _step(self, costs: Costs, rows: int, seconds: Callable[[int], float]) -> Step:
        measured = self._measured(costs, rows, seconds)
        return Step(rows, measured, costs.aside, costs.per_draft)

    def _measured(
        self, costs: Costs, rows: int, seconds: Callable[[int], float]
    ) -> Callable[[int], float]:
        """Expected duration of passes, corrected by passes with a similar number of drafts."""
        times = [costs.factor(bits) for bits in range((self.most * rows).bit_length() + 1)]
        return lambda drafts: seconds(drafts) * times[drafts.bit_length()]

    def _afford(self, price: float) -> bool:
        """Pay this many plain steps for a trial, if the allowance permits."""
        if self.saved < min(price, SAVED):
            return False
        self.saved -= price
        return True

    def rested(self, rows: Sequence[Sequence[RowOdds | None]]) -> None:
        """Count a step for these rows."""
        self.steps += 1
        self.saved = min(SAVED, self.saved + ALLOWANCE)
        for costs in self.costs.values():
            costs.forget()
        for odds in (each for row in rows for each in row if each is not None):
            odds.rest = max(0, odds.rest - 1)

    def learn(self, source: int, row: RowOdds, drafts: int, held: int) -> None:
        """Add the result of a row's drafts. 0 drafts: the drafter had none."""
        self.sources[source].learn(row, drafts, held)
        self.saved = min(SAVED, self.saved + held * row.worth)

    def timed(self, kind: Kind, aside: float, guessing: float, rounds: int) -> None:
        """In a step with drafts, the device idled for `aside` seconds, in addition to
        `guessing`."""
        costs = self.costs[kind]
        costs.aside = _followed(costs.aside, aside)
        if rounds:
            costs.per_draft = _followed(costs.per_draft, guessing / rounds)

    def passed(self, kind: Kind, drafts: int, times: float) -> None:
        """A pass with this many drafts took `times` its expected duration."""
        costs, bits = self.costs[kind], drafts.bit_length()
        known = costs.factor(bits)
        if bits in costs.slower:  # the first pass may have compiled kernels
            known = QUICK * known + (1 - QUICK) * max(LEAST_PASS_FACTOR, min(times, SPIKE * known))
        costs.slower[bits] = known


KNOWN_TEXT: Kind = frozenset({KNOWN})


def _cumulative(share: float, places: Sequence[float]) -> list[float]:
    """Chances of drafts to hold with those before them. `places`: see `SourceOdds`."""
    chance, chances = 1.0, []
    for times in places:
        one = share * times
        chance *= min(SUREST, one)
        chances.append(chance)
    return chances


def _kinds(able: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All combinations of drafters, the smallest first."""
    for size in range(1, len(able) + 1):
        yield from combinations(able, size)


def _likeliest(row: Chances, kind: Sequence[int]) -> int | None:
    """The drafter of a row from which most drafts are expected to hold. `None`: none is asked."""
    able = [source for source in kind if source < len(row) and row[source]]
    return max(able, key=lambda source: sum(row[source]), default=None)


def within(asks: Asks, most: int) -> Asks:
    """The same for at most so many drafts."""
    return tuple(Ask(ask.source, min(ask.drafts, most)) for ask in asks) if most > 0 else ()


def _with_others(row: Chances, pick: int, drafts: int) -> Asks:
    """A row's drafter, and one before it in the order of drafters that is asked if it has no guess,
    for drafts that gain as much as the last one of the first."""
    least = _gains(row[pick])[drafts - 1]
    other = _likeliest(row, range(pick))
    more = 0 if other is None else sum(gain >= least for gain in _gains(row[other]))
    asks = (Ask(pick, drafts), Ask(other or 0, more))
    return asks if more else asks[:1]


def _gains(chances: Sequence[float]) -> list[float]:
    """Share of a row's tokens that each further draft adds."""
    tokens = accumulate(chances, initial=1.0)
    return [chance / before for chance, before in zip(chances, tokens, strict=False)]


def _fastest(rows: Chances, step: Step) -> tuple[list[int], float]:
    """The drafts that maximise the product of all rows' rates, if the gain is sufficient, and the
    logarithm of the gain.

    A sum would let rows with poor drafts pay for the others. rows: chances of the drafts of each.
    """
    counts, rounds, gain, plain = [0] * len(rows), 0, 0.0, step.plain
    best, most = list(counts), step.rows * MARGIN
    tokens = [1.0] * step.rows
    if sum(log1p(sum(row)) for row in rows) <= most:  # if drafts took no time
        return best, most
    likeliest = [(-log1p(row[0]), at, row[0]) for at, row in enumerate(rows) if row]
    heapify(likeliest)
    for drafts in range(1, sum(map(len, rows)) + 1):
        added, at, chance = likeliest[0]
        counts[at] += 1
        tokens[at] += chance
        gain -= added
        rounds = max(rounds, counts[at])
        chance = rows[at][counts[at]] if counts[at] < len(rows[at]) else 0.0
        heapreplace(likeliest, (-log1p(chance / tokens[at]), at, chance))
        longer = step.took(drafts, rounds) / plain
        gained = gain - step.rows * log(longer)
        if gained > most and min(tokens) >= PACE_SHARE * longer:
            best, most = list(counts), gained
    return best, most


def _price(tried: Choice, best: Choice) -> float:
    """Extra time of a step with trials over the best step, in plain steps.

    If there would be no drafts otherwise, this includes the idle time of the device.
    """
    longer = tried.seconds - best.seconds
    return (longer + (0.0 if any(best.counts) else tried.step.aside)) / best.step.plain


def _followed(known: float, seconds: float) -> float:
    if not known or SPIKE * seconds < known:
        return seconds
    return DECAY * known + (1 - DECAY) * min(seconds, RISE * known)
