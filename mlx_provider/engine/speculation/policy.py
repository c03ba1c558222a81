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

Kind = frozenset[int]
"""The drafters of a pass."""
KNOWN_TEXT: Kind = frozenset({-1})
"""Text that a grammar or a text predictor knows ahead."""
Seconds = Callable[[int], float]
"""Duration of a pass by the number of its extra tokens."""

DECAY, QUICK = 0.8, 0.7
"""Weight of the old value at each new measurement: of the host's time, of passes with drafts."""
SPIKE, RISE = 3.0, 1.5
"""A measurement above this multiple of the known value is a disturbance; of the host's time."""
FORGOTTEN = 0.9998
"""Decay of measurements per step, because they become out of date."""
MARGIN = log(1.08)
"""Least expected gain, as the logarithm of a rate, because the estimates are not exact."""
PACE_SHARE = 0.75
"""Least share of its pace that each row keeps, however much drafts help other rows."""
MEMORY, LASTING = 24, 200
"""Drafts that are remembered of a row, few, to react soon to a change in its text; of all rows."""
BELIEF = 2.0
"""Prior weight, in drafts, of a row at the rate of other rows."""
HOPE, GOOD, SUREST = 0.7, 0.9, 0.99
"""Acceptance rates: assumed before any measurement; assumed in a trial; the highest estimate."""
MISSED_PASSES = 3
"""Passes in sequence without an accepted draft, after which the drafter is parked for the row."""
AWAITED = 2
"""Steps until the result of a trial is known: passes are planned before the last one is read."""
REFUSED, LONGEST_REST = 8, 32
"""A trial that does not pay is considered again in the next step whose number is a multiple of
this, for all rows in one step; and most steps between trials that may pay."""
ALLOWANCE, SAVED = 0.01, 6.0
"""Share of the time that trials may take, and the most plain steps of it, at first, too. Accepted
drafts add to it."""


class Ask(NamedTuple):
    source: int
    drafts: int


Asks = tuple[Ask, ...]
"""The drafters of a row in one step. The next one is asked if the one before has no guess."""
Chances = Sequence[float]
"""That a draft and all before it are accepted, draft by draft. Empty: the drafter is not asked."""


@dataclass
class DraftCosts:
    per_draft: float = 0.0
    aside: float = 0.0
    """Seconds that the device idles in a step with drafts, because tokens are read first."""
    slower: dict[int, float] = field(default_factory=dict)
    """Measured over expected duration of passes, by the bit length of their number of drafts."""

    def factor(self, drafts: int) -> float:
        """Factor of the measured passes with the most drafts, up to this number."""
        bits = range(drafts.bit_length(), 0, -1)
        return next((self.slower[n] for n in bits if n in self.slower), 1.0)

    def took(self, seconds: Seconds, drafts: int, rounds: int) -> float:
        own = self.aside + self.per_draft * rounds
        return seconds(drafts) * self.factor(drafts) + own

    def add_times(self, aside: float, guessing: float, rounds: int) -> None:
        """The device idled for `aside` seconds, in addition to `guessing`."""
        self.aside = _follow(self.aside, aside)
        if rounds:
            self.per_draft = _follow(self.per_draft, guessing / rounds)

    def add_pass(self, drafts: int, times: float) -> None:
        bits, known = drafts.bit_length(), self.factor(drafts)
        if bits in self.slower:  # the first pass may have compiled kernels
            times = max(0.1, min(times, SPIKE * known))  # most may be over once it is launched
            known = QUICK * known + (1 - QUICK) * times
        self.slower[bits] = known

    def forget(self) -> None:
        self.aside *= FORGOTTEN
        self.per_draft *= FORGOTTEN
        for bits, times in self.slower.items():
            self.slower[bits] = 1 + FORGOTTEN * (times - 1)


def _follow(known: float, seconds: float) -> float:
    if not known or SPIKE * seconds < known:
        return seconds
    return DECAY * known + (1 - DECAY) * min(seconds, RISE * known)


class Choice(NamedTuple):
    picks: Sequence[int]
    counts: Sequence[int]
    gain: float
    """Logarithm of the product of all rows' rates, over that without drafts."""
    longer: float = 1.0
    """Duration of the step, as a multiple of one without drafts."""


def fastest(
    chances: Sequence[Chances],
    rows: int,
    costs: DraftCosts,
    seconds: Seconds,
    least: float = PACE_SHARE,
) -> tuple[list[int], float, float]:
    """The number of drafts of each row with the greatest product of all rows' rates, if the gain is
    sufficient; a sum would let rows with poor drafts pay for the others. With the gain, and the
    duration as a multiple of one without drafts. `rows`: of the pass, also those that cannot
    draft; `least`: share of its pace that each keeps."""
    best, tokens, counts = [0] * len(chances), [1.0] * len(chances), [0] * len(chances)
    most, times, gained, rounds = rows * MARGIN, 1.0, 0.0, 0
    alone = len(chances) < rows
    gains = [
        (log1p(chance / before), row, chance)
        for row, own in enumerate(chances)
        for chance, before in zip(own, accumulate(own, initial=1.0), strict=False)
    ]
    gains.sort(key=lambda chance: -chance[0])  # of a row, each gains less
    for drafts, (gain, row, chance) in enumerate(gains, 1):
        counts[row] += 1
        tokens[row] += chance
        gained, rounds = gained + gain, max(rounds, counts[row])
        longer = costs.took(seconds, drafts, rounds) / seconds(0)
        value = gained - rows * log(longer)
        if value > most and min(1.0 if alone else inf, *tokens) >= least * longer:
            best, most, times = counts.copy(), value, longer
    return best, most, times


@dataclass
class AcceptanceRate:
    memory: int = MEMORY
    accepted: float = 0.0
    tried: float = 0.0

    def learn(self, accepted: int, tried: int) -> None:
        """Drafts after a rejected one do not count."""
        kept = (1 - 1 / self.memory) ** tried
        self.accepted = kept * self.accepted + accepted
        self.tried = kept * self.tried + tried

    def share(self, belief: float) -> float:
        return min(SUREST, (self.accepted + BELIEF * belief) / (self.tried + BELIEF))


@dataclass
class SharedRate(AcceptanceRate):
    """The acceptance rate of all rows together, which a new row is expected to have, too."""

    memory: int = LASTING

    def chance(self, row: AcceptanceRate) -> float:
        return row.share(self.share(HOPE))

    def learn_both(self, row: AcceptanceRate, accepted: int, tried: int = 1) -> None:
        row.learn(accepted, tried)
        self.learn(accepted, tried)


@dataclass
class RowAcceptance(AcceptanceRate):
    missed: int = 0
    due: int = 0
    """Step from which on it may be tried."""

    @property
    def parked(self) -> bool:
        return self.missed >= MISSED_PASSES

    def learn(self, accepted: int, tried: int) -> None:
        if accepted and self.parked:  # its text may have changed in kind: four drafts count
            kept = min(1.0, 4.0 / max(self.tried, 4.0))
            self.accepted, self.tried, self.due = kept * self.accepted, kept * self.tried, 0
        super().learn(accepted, tried)
        self.missed = 0 if accepted else self.missed + 1


RowRates = Sequence[RowAcceptance | None]
"""Acceptance rates of one row, by drafter; `None`: it cannot draft for the row."""


@dataclass
class Policy:
    most: int = MOST_DRAFTS
    beside_prompts: bool = False
    """Whether a step that prefills may have drafts."""
    sources: dict[int, SharedRate] = field(default_factory=lambda: defaultdict(SharedRate))
    costs: dict[Kind, DraftCosts] = field(default_factory=lambda: defaultdict(DraftCosts))
    predicted: SharedRate = field(default_factory=SharedRate)
    """Acceptance of predicted text, whether its tokens were drafts or not."""
    steps: int = 0
    saved: float = SAVED
    """Plain steps that trials may take."""
    _rows: int = 1
    """Of the last pass."""
    _rests: bool = False
    """No drafts until a parked drafter may be tried, or the result of a draft is known."""

    def asks_none(self, rows: Iterable[RowRates]) -> bool:
        """Whether no drafter is asked for these rows, as for most steps of text without repetition:
        then `choose` need not see them."""
        return self._rests and not any(own and own.due <= self.steps for row in rows for own in row)

    def choose(self, rows: Sequence[RowRates], others: int, seconds: Seconds) -> list[Asks]:
        """The drafters to ask for each row. `others`: rows without drafters."""
        if self.asks_none(rows):
            return [()] * len(rows)
        due = [
            {at: own.due for at, own in enumerate(row) if own and own.due <= self.steps}
            for row in rows
        ]
        self._rows, seconds = len(rows) + others, cache(seconds)
        chances = [[self._chances(at, own) for at, own in enumerate(row)] for row in rows]
        best = self._best_of(chances, seconds)
        # drafts that are expected to pay need no allowance and leave no debt
        self.saved = max(self.saved + 1 - best.longer, min(self.saved, 0.0))
        asks = list(map(_asks, chances, best.picks, best.counts))
        for own, pick, drafts in zip(due, best.picks, best.counts, strict=True):
            if drafts:
                own.pop(pick, None)
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
        """A pass with drafts of several drafters has its own measurement."""
        held = [[*map(sum, row)] for row in chances]
        best = Choice([0] * len(held), [0] * len(held), self._rows * MARGIN)
        able = sorted({at for row in held for at, most in enumerate(row) if most})
        for kind in chain(*(combinations(able, 1 + size) for size in range(len(able)))):
            picks = [max(kind, key=row.__getitem__) for row in held]
            own = [row[pick] for row, pick in zip(chances, picks, strict=True)]
            if len({pick for pick, drafts in zip(picks, own, strict=True) if drafts}) < len(kind):
                continue  # fewer drafters are enough
            free = sum(log1p(row[pick]) for row, pick in zip(held, picks, strict=True))
            if free <= best.gain:  # even if drafts took no time
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
        """The asks with drafters of `tries` (by row) before them, where that may pay."""
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
        price += 0.0 if any(best.counts) else costs.aside / seconds(0)  # and before the next pass
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
        self.steps += 1
        self.saved = min(SAVED, self.saved + ALLOWANCE)
        for costs in self.costs.values():
            costs.forget()

    def learn(self, source: int, row: RowAcceptance, drafts: int, accepted: int) -> None:
        self.sources[source].learn_both(row, accepted, min(max(1, drafts), accepted + 1))
        if row.parked:
            rest = min(LONGEST_REST, 1 << min(row.missed, 20) - MISSED_PASSES)
            row.due = max(row.due, self.steps + rest)
        self._rests = False
        self.saved = min(SAVED, self.saved + accepted / self._rows)


def _asks(chances: Sequence[Chances], pick: int, drafts: int) -> Asks:
    """A row's drafter, then the earlier ones in case it has no guess, for as many drafts as gain at
    least as much as the last one of the first."""
    if not drafts:
        return ()
    gains = [
        [chance / before for chance, before in zip(own, accumulate(own, initial=1.0), strict=False)]
        for own in chances
    ]
    least = gains[pick][drafts - 1]
    others = [Ask(at, sum(gain >= least for gain in gains[at])) for at in range(pick)]
    return (Ask(pick, drafts), *(ask for ask in others if ask.drafts))
