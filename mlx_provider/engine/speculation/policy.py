"""Decides how many drafts pay in a pass, and which drafter gives them. Imports no mlx.

A draft costs the extra time of a wider pass, as measured (`DraftCosts`), and saves a whole pass if
it is accepted. Each row has an acceptance rate for each drafter. A drafter that misses often is
parked for the row: it is tried again after rests that double, as far as an allowance lasts.
Drafters are named by their index, the best first."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain, combinations
from math import inf, log, log1p
from operator import mul
from typing import NamedTuple

from ...records.extensions import MOST_DRAFTS

Kind = frozenset[int]  # the drafters of a pass. Each set has its own measured costs
KNOWN_TEXT: Kind = frozenset({-1})  # text that a grammar or a text predictor knows ahead
Seconds = Callable[[int], float]  # expected seconds of a pass with so many drafts

DECAY, QUICK = 0.8, 0.7
"""Weight of the old value in the mean with a new one: of the host's time, of passes with drafts."""
SPIKE, RISE = 3.0, 1.5
"""Most that a new value counts, as a multiple of the old one: of passes, of the host's time."""
FORGOTTEN = 0.9998  # decay of measurements per step, because they become out of date
MARGIN = log(1.08)  # least expected gain, as the logarithm of a rate: estimates are not exact
PACE_SHARE = 0.75  # least share of its pace that a row keeps, however much drafts help others
MEMORY, LASTING = 24, 200
"""Drafts that a rate remembers: few for one row, to follow its text as it changes; for all rows."""
BELIEF = 2.0  # how many drafts of its own weigh as much for a row as the rate of all rows
HOPE, GOOD, SUREST = 0.7, 0.9, 0.99
"""Acceptance rates: assumed before any measurement, assumed in a trial, the highest estimate."""
MISSED_PASSES = 3  # a drafter is parked for a row after so many passes without an accepted draft
AWAITED = 2  # steps until a trial's result is known: a pass is planned before the last is read
REFUSED, LONGEST_REST = 8, 32
"""A trial that is not made is considered again in the next step whose number is a multiple of the
first (of the second if the row has other drafts), so that all rows have trials in the same step.
The second is also the longest rest of a parked drafter, in steps."""
ALLOWANCE, SAVED = 0.01, 6.0
"""Trials may take this share of the time. Unused time is saved, up to so many plain steps, and so
much is saved at first. Accepted drafts add to it."""


class Ask(NamedTuple):
    source: int  # index of the drafter
    drafts: int


Asks = tuple[Ask, ...]
"""The drafters of a row in one step. The next one is asked if the one before has no guess."""
Chances = Sequence[float]
"""For each draft, the chance that it and all before it are accepted. Empty: no drafts."""


@dataclass
class DraftCosts:
    per_draft: float = 0.0  # seconds of the drafters for one more draft of each row
    aside: float = 0.0
    """Seconds that the device idles in a step with drafts, because tokens are read first."""
    slower: dict[int, float] = field(default_factory=dict)
    """Measured over expected duration of passes, by the bit length of their number of drafts."""

    def factor(self, drafts: int) -> float:
        """Measured over expected duration of a pass with so many drafts, or fewer. Unknown: 1."""
        bits = range(drafts.bit_length(), 0, -1)
        return next((self.slower[n] for n in bits if n in self.slower), 1.0)

    def took(self, seconds: Seconds, drafts: int, rounds: int) -> float:
        """Seconds of a step with so many drafts, of which one row has at most `rounds`."""
        own = self.aside + self.per_draft * rounds
        return seconds(drafts) * self.factor(drafts) + own

    def add_times(self, aside: float, guessing: float, rounds: int) -> None:
        """The device idled for `aside` seconds, and for `guessing` seconds while drafters made
        `rounds` drafts of a row. 0 rounds: `guessing` is not typical."""
        self.aside = _follow(self.aside, aside)
        if rounds:
            self.per_draft = _follow(self.per_draft, guessing / rounds)

    def add_pass(self, drafts: int, times: float) -> None:
        """A pass with so many drafts took `times` its expected duration."""
        bits, known = drafts.bit_length(), self.factor(drafts)
        if bits in self.slower:  # else do not count it: a first pass may have compiled kernels
            # a pass may be nearly over when its launch returns and its time begins
            times = max(0.1, min(times, SPIKE * known))
            known = QUICK * known + (1 - QUICK) * times
        self.slower[bits] = known

    def forget(self) -> None:
        """Let all measurements fade by one step."""
        self.aside *= FORGOTTEN
        self.per_draft *= FORGOTTEN
        for bits, times in self.slower.items():
            self.slower[bits] = 1 + FORGOTTEN * (times - 1)


def _follow(known: float, seconds: float) -> float:
    if not known or SPIKE * seconds < known:  # so much less is no accident: the old value is wrong
        return seconds
    return DECAY * known + (1 - DECAY) * min(seconds, RISE * known)


class Choice(NamedTuple):
    picks: Sequence[int]  # the drafter of each row
    counts: Sequence[int]  # the number of drafts of each row
    gain: float  # logarithm of the product of all rows' rates, over that without drafts
    longer: float = 1.0  # duration of the step, as a multiple of one without drafts


def fastest(
    chances: Sequence[Chances],
    rows: int,
    costs: DraftCosts,
    seconds: Seconds,
    least: float = PACE_SHARE,
) -> tuple[list[int], float, float]:
    """Choose the number of drafts of each row so that the product of all rows' rates is greatest: a
    sum would let rows with poor drafts pay for the others. All 0 if the gain is not sufficient.
    Returns the numbers, then `gain` and `longer` of a `Choice`. `rows`: of the pass, with those
    that cannot draft. `least`: share of its pace that each row keeps."""
    best, tokens, counts = [0] * len(chances), [1.0] * len(chances), [0] * len(chances)
    best_gain, best_longer, gained, rounds = rows * MARGIN, 1.0, 0.0, 0
    plain_tokens = 1.0 if len(chances) < rows else inf  # of a row that cannot draft
    gains = [
        (log1p(chance / before), row, chance)
        for row, own in enumerate(chances)
        for chance, before in zip(own, accumulate(own, initial=1.0), strict=False)
    ]
    gains.sort(key=lambda gain: -gain[0])  # of one row, each draft gains less than those before
    for drafts, (gain, row, chance) in enumerate(gains, 1):
        counts[row] += 1
        tokens[row] += chance
        gained, rounds = gained + gain, max(rounds, counts[row])
        longer = costs.took(seconds, drafts, rounds) / seconds(0)
        value = gained - rows * log(longer)
        if value > best_gain and min(plain_tokens, *tokens) >= least * longer:
            best, best_gain, best_longer = counts.copy(), value, longer
    return best, best_gain, best_longer


@dataclass
class AcceptanceRate:
    """Counts of drafts, in which earlier drafts weigh less."""

    memory: int = MEMORY
    accepted: float = 0.0
    tried: float = 0.0

    def learn(self, accepted: int, tried: int) -> None:
        """Add the drafts of a pass. Those after a rejected one must not be in `tried`."""
        kept = (1 - 1 / self.memory) ** tried
        self.accepted = kept * self.accepted + accepted
        self.tried = kept * self.tried + tried

    def share(self, belief: float) -> float:
        """The rate, at most `SUREST`. `belief`: what is expected before any draft."""
        return min(SUREST, (self.accepted + BELIEF * belief) / (self.tried + BELIEF))


@dataclass
class SharedRate(AcceptanceRate):
    """The acceptance rate of all rows together, which a new row is expected to have, too."""

    memory: int = LASTING

    def chance(self, row: AcceptanceRate) -> float:
        """The rate to expect of a row."""
        return row.share(self.share(HOPE))

    def learn_both(self, row: AcceptanceRate, accepted: int, tried: int = 1) -> None:
        row.learn(accepted, tried)
        self.learn(accepted, tried)


@dataclass
class RowAcceptance(AcceptanceRate):
    missed: int = 0  # passes since a draft was accepted
    due: int = 0  # number of the step from which on a trial may be made

    @property
    def parked(self) -> bool:
        return self.missed >= MISSED_PASSES

    def learn(self, accepted: int, tried: int) -> None:
        if accepted and self.parked:  # the text may have changed: all before counts as four drafts
            kept = min(1.0, 4.0 / max(self.tried, 4.0))
            self.accepted, self.tried, self.due = kept * self.accepted, kept * self.tried, 0
        super().learn(accepted, tried)
        self.missed = 0 if accepted else self.missed + 1


RowRates = Sequence[RowAcceptance | None]
"""Acceptance rates of one row, by drafter. `None`: the drafter cannot draft for the row."""


@dataclass
class Policy:
    most: int = MOST_DRAFTS  # most drafts of a row in a pass
    beside_prompts: bool = False  # whether a step that prefills may have drafts
    sources: dict[int, SharedRate] = field(default_factory=lambda: defaultdict(SharedRate))
    costs: dict[Kind, DraftCosts] = field(default_factory=lambda: defaultdict(DraftCosts))
    predicted: SharedRate = field(default_factory=SharedRate)
    """Acceptance of predicted text, whether its tokens were drafts or not."""
    steps: int = 0
    saved: float = SAVED  # time that trials may take, in plain steps
    _rows: int = 1  # of the last pass
    _rests: bool = False
    """Whether to make no drafts until a trial is due, or the result of a draft is known."""

    def asks_none(self, rows: Iterable[RowRates]) -> bool:
        """Whether `choose` would ask no drafter for these rows, as in most steps of plain text."""
        return self._rests and not any(own and own.due <= self.steps for row in rows for own in row)

    def choose(self, rows: Sequence[RowRates], others: int, seconds: Seconds) -> list[Asks]:
        """The drafters to ask for each row. `others`: number of other rows, without drafters."""
        if self.asks_none(rows):
            return [()] * len(rows)
        due = [
            {source: own.due for source, own in enumerate(row) if own and own.due <= self.steps}
            for row in rows
        ]
        self._rows, seconds = len(rows) + others, cache(seconds)
        chances = [[self._chances(source, own) for source, own in enumerate(row)] for row in rows]
        best = self._best_of(chances, seconds)
        # expected drafts need no allowance: they use up what is saved, but leave no debt
        self.saved = max(self.saved + 1 - best.longer, min(self.saved, 0.0))
        asks = list(map(_asks, chances, best.picks, best.counts))
        for own, pick, drafts in zip(due, best.picks, best.counts, strict=True):
            if drafts:
                own.pop(pick, None)
        # for each row, one drafter that it has not got by now: the one that is due for longest
        tries = {at: min(own, key=own.__getitem__) for at, own in enumerate(due) if own}
        if tries:
            asks = self._try(rows, tries, chances, best, asks, seconds)
        self._rests = not any(asks)
        return asks

    def _chances(self, source: int, row: RowAcceptance | None) -> Chances:
        if row is None or row.parked:
            return ()
        share = self.sources[source].chance(row)
        return [share**drafts for drafts in range(1, 1 + self.most)]

    def _best_of(self, chances: Sequence[Sequence[Chances]], seconds: Seconds) -> Choice:
        """Compare all sets of drafters, as each has its own costs. In a set, each row has the
        drafter of which most drafts would be accepted."""
        expected = [[*map(sum, row)] for row in chances]  # accepted drafts, by row and drafter
        best = Choice([0] * len(expected), [0] * len(expected), self._rows * MARGIN)
        able = sorted({source for row in expected for source, most in enumerate(row) if most})
        for kind in chain(*(combinations(able, 1 + size) for size in range(len(able)))):
            picks = [max(kind, key=row.__getitem__) for row in expected]
            own = [row[pick] for row, pick in zip(chances, picks, strict=True)]
            if len({pick for pick, drafts in zip(picks, own, strict=True) if drafts}) < len(kind):
                continue  # fewer drafters are enough
            most_gain = sum(log1p(row[pick]) for row, pick in zip(expected, picks, strict=True))
            if most_gain <= best.gain:  # even if drafts took no time
                continue
            found = fastest(own, self._rows, self.costs[frozenset(kind)], seconds)
            if found[1] > best.gain:
                best = Choice(picks, *found)
        return best

    def _try(
        self,
        rows: Sequence[RowRates],
        tries: Mapping[int, int],
        chances: Sequence[Sequence[Chances]],
        best: Choice,
        first: list[Asks],
        seconds: Seconds,
    ) -> list[Asks]:
        """Put the drafters in `tries`, by row, before the asks in `first`, where that may pay. But
        return `first` if the allowance does not last."""
        hopes, asks = [[*own] for own in chances], [*first]
        for at, source in tries.items():
            share = SUREST if best.counts[at] else GOOD
            hopes[at][source] = [share**n for n in range(1, 1 + self.most)]
        hopeful = self._best_of(hopes, seconds)
        for at, source in tries.items():
            if hopeful.counts[at] and hopeful.picks[at] == source:
                own = Ask(source, hopeful.counts[at] if best.counts[at] else 1)
                asks[at] = (own, *(ask for ask in first[at] if ask.source != source))
        counts = [own[0].drafts if own else 0 for own in asks]
        costs = self.costs[frozenset(own[0].source for own in asks if own)]
        price = costs.took(seconds, sum(counts), max(counts)) / seconds(0) - best.longer
        if not any(best.counts):  # then the device idles before the next pass, too
            price += costs.aside / seconds(0)
        affordable = asks != first and self.saved >= min(price, SAVED)
        for at, source in tries.items():
            if rate := rows[at][source]:
                rest = LONGEST_REST if best.counts[at] else REFUSED
                awaited = affordable and not best.counts[at]
                rate.due = self.steps + (AWAITED if awaited else rest - self.steps % rest)
        self.saved -= price if affordable else 0.0
        return asks if affordable else first

    def known_drafts(self, chances: Sequence[float], rows: int, seconds: Seconds) -> int:
        """How many drafts of predicted text of one row gain more than all rows lose. `chances`:
        acceptance of each draft if those before it are accepted; `rows`: rows of the pass."""
        own = [*accumulate(chances[: self.most], mul)]
        (best,), *_ = fastest([own], rows, self.costs[KNOWN_TEXT], seconds, least=0.0)
        return best

    def end_step(self) -> None:
        """Count a step, in which earlier measurements fade and the allowance grows."""
        self.steps += 1
        self.saved = min(SAVED, self.saved + ALLOWANCE)
        for costs in self.costs.values():
            costs.forget()

    def learn(self, source: int, row: RowAcceptance, drafts: int, accepted: int) -> None:
        """Add a row's drafts in a pass. 0 drafts: the drafter had no guess, which is a miss."""
        self.sources[source].learn_both(row, accepted, min(max(1, drafts), accepted + 1))
        if row.parked:
            rest = min(LONGEST_REST, 1 << min(row.missed, 20) - MISSED_PASSES)
            row.due = max(row.due, self.steps + rest)
        self._rests = False
        self.saved = min(SAVED, self.saved + accepted / self._rows)


def _asks(chances: Sequence[Chances], pick: int, drafts: int) -> Asks:
    """Ask a row's drafter `pick`, then the earlier ones in case it has no guess: for as many drafts
    as gain at least as much as the last one of `pick`."""
    if not drafts:
        return ()
    gains = [
        [chance / before for chance, before in zip(own, accumulate(own, initial=1.0), strict=False)]
        for own in chances
    ]
    least = gains[pick][drafts - 1]
    others = [Ask(at, sum(gain >= least for gain in gains[at])) for at in range(pick)]
    return (Ask(pick, drafts), *(ask for ask in others if ask.drafts))
