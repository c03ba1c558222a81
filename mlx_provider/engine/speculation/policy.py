"""Decides how many drafts pay in a pass, and which drafter gives them. Imports no mlx.

A draft costs the extra time of a wider pass, as measured (`DraftCosts`), and saves a whole pass if
it is accepted. Each row has an acceptance rate for each drafter. A drafter without drafts for a row
is tried again in some steps. Drafters are named by their index, the best first.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain, combinations
from math import inf, log, log1p
from operator import mul
from typing import NamedTuple

from ...records.extensions import MOST_DRAFTS

Kind = frozenset[int]
KNOWN_TEXT: Kind = frozenset({-1})
"""Text predicted by a grammar or a forecast."""
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
BELIEF, PLACES = 2.0, 4.0
"""Prior weight, in drafts, of a row at the rate of other rows, and of equal rates at all
positions."""
HOPE, GOOD, SUREST = 0.7, 0.9, 0.99
"""Acceptance rates: assumed before any measurement; assumed in a trial; the highest estimate."""
MISSED_PASSES = 3
"""Passes in sequence without an accepted draft, after which a row gets only trials."""
AWAITED = 2
"""Steps until the result of a trial is known: passes are planned before the last one is read."""
REFUSED, LONGEST_REST = 8, 32
"""A refused trial is considered again in the next step whose number is a multiple of this, for all
rows in one step; and most steps between affordable trials."""
ALLOWANCE, SAVED = 0.01, 6.0
"""Share of the time that trials may take, and the most plain steps of it, at first, too. Accepted
drafts of trials add to it."""


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
        if not drafts:
            return seconds(0)
        own = self.aside + self.per_draft * rounds
        return seconds(drafts) * self.factor(drafts) + own

    def timed(self, aside: float, guessing: float, rounds: int) -> None:
        """The device idled for `aside` seconds, in addition to `guessing`."""
        self.aside = _follow(self.aside, aside)
        if rounds:
            self.per_draft = _follow(self.per_draft, guessing / rounds)

    def passed(self, drafts: int, times: float) -> None:
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
    gain: float = 0.0
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
    gains.sort(key=lambda each: -each[0])  # of a row, each gains less
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
    held: float = 0.0
    tried: float = 0.0

    def learn(self, held: int, tried: int) -> None:
        """Drafts after a rejected one do not count."""
        kept = (1 - 1 / self.memory) ** tried
        self.held = kept * self.held + held
        self.tried = kept * self.tried + tried

    def share(self, belief: float) -> float:
        return min(SUREST, (self.held + BELIEF * belief) / (self.tried + BELIEF))


@dataclass
class SharedRate(AcceptanceRate):
    """Of all rows together, which a new row is expected to have, too."""

    memory: int = LASTING
    hope: float = HOPE

    def chance(self, row: AcceptanceRate) -> float:
        return row.share(self.share(self.hope))

    def learn_both(self, row: AcceptanceRate, held: int, tried: int = 1) -> None:
        row.learn(held, tried)
        self.learn(held, tried)


@dataclass
class RowAcceptance(AcceptanceRate):
    missed: int = 0
    due: int = 0
    """Step from which on it may be tried."""

    @property
    def trusted(self) -> bool:
        return self.missed < MISSED_PASSES

    def learn(self, held: int, tried: int) -> None:
        if held and not self.trusted:  # its text may have changed in kind: four drafts count
            kept = min(1.0, 4.0 / max(self.tried, 4.0))
            self.held, self.tried, self.due = kept * self.held, kept * self.tried, 0
        super().learn(held, tried)
        self.missed = 0 if held else self.missed + 1


Rows = Sequence[Sequence[RowAcceptance | None]]
"""Of each row and drafter; `None`: it cannot draft for the row."""


@dataclass
class DrafterAcceptance:
    everyone: SharedRate = field(default_factory=SharedRate)
    held: list[float] = field(default_factory=lambda: [0.0] * MOST_DRAFTS)
    """Accepted drafts by position."""
    expected: list[float] = field(default_factory=lambda: [0.0] * MOST_DRAFTS)
    """The same by the acceptance rate of each row."""

    def chances(self, rows: Sequence[RowAcceptance | None], most: int) -> list[Chances]:
        """Of each row. A drafter that is not trusted for a row is not asked."""
        pairs = zip(self.held[:most], self.expected, strict=False)
        places = [(held + PLACES) / (expected + PLACES) for held, expected in pairs]
        hope = self.everyone.share(HOPE)
        shares = [row.share(hope) if row and row.trusted else 0.0 for row in rows]
        return [
            [*accumulate([min(SUREST, share * each) for each in places], mul)] if share else ()
            for share in shares
        ]

    def learn(self, row: RowAcceptance, drafts: int, held: int) -> None:
        share, tried = self.everyone.chance(row), min(max(1, drafts), held + 1)
        kept = 1 - 1 / LASTING
        for at in range(min(tried, MOST_DRAFTS)):
            self.expected[at] = kept * self.expected[at] + share
            self.held[at] = kept * self.held[at] + (at < held)
        self.everyone.learn_both(row, held, tried)


@dataclass
class KnownText:
    most: int = MOST_DRAFTS
    costs: DraftCosts = field(default_factory=DraftCosts)
    foretold: SharedRate = field(default_factory=SharedRate)
    """Acceptance of predicted tokens, whether they were drafts or not."""
    begins: SharedRate = field(default_factory=lambda: SharedRate(hope=0.1))
    """How often predicted text begins after a token that was not predicted."""

    def worthwhile(self, chances: Sequence[float], rows: int, seconds: Seconds) -> int:
        """How many drafts of one row gain more than all rows lose. `chances`: acceptance of each
        draft if those before it are accepted; `rows`: rows of the pass."""
        own = [*accumulate(chances[: self.most], mul)]
        (best,), *_ = fastest([own], rows, self.costs, seconds, least=0.0)
        return best

    def reads_first(self, row: AcceptanceRate, rows: int, seconds: Seconds) -> bool:
        """Whether reading a row's last token before the next pass gains more than all rows lose,
        because predicted text may begin after it. `row`: its own results, see `begins`."""
        return log1p(self.begins.chance(row)) > rows * (
            log1p(self.costs.aside / seconds(0)) + MARGIN
        )


@dataclass
class Policy:
    most: int = MOST_DRAFTS
    beside_prompts: bool = False
    """Whether a step that prefills may have drafts."""
    sources: dict[int, DrafterAcceptance] = field(
        default_factory=lambda: defaultdict(DrafterAcceptance)
    )
    costs: dict[Kind, DraftCosts] = field(default_factory=lambda: defaultdict(DraftCosts))
    known_text: KnownText = field(default_factory=KnownText)
    steps: int = 0
    saved: float = SAVED
    """Plain steps that trials may take."""
    _rows: int = 1
    """Of the last pass."""
    _rests: bool = False
    """No drafts, until a drafter of a row may be tried or the result of a draft is known."""

    def __post_init__(self) -> None:
        self.known_text.most = self.most
        self.costs[KNOWN_TEXT] = self.known_text.costs

    def wanted(self, rows: Rows, others: int, seconds: Seconds) -> list[Asks]:
        """The drafters to ask for each row. `others`: rows without drafters."""
        due = [
            {at: odds.due for at, odds in enumerate(row) if odds and odds.due <= self.steps}
            for row in rows
        ]
        if self._rests and not any(due):
            return [()] * len(rows)
        count, seconds = len(rows) + others, cache(seconds)
        columns = [
            self.sources[at].chances(column, self.most)
            for at, column in enumerate(zip(*rows, strict=True))
        ]
        chances = [*zip(*columns, strict=True)]
        best, self._rows = self._best_of(chances, count, seconds), count
        # drafts that are expected to pay need no allowance and leave no debt
        self.saved = max(self.saved + 1 - best.longer, min(self.saved, 0.0))
        asks: list[Asks] = []
        for own, tried, pick, drafts in zip(chances, due, best.picks, best.counts, strict=True):
            asks.append(_asks(own, pick, drafts) if drafts else ())
            if drafts:
                tried.pop(pick, None)
        if any(due):
            tries = [min(each, key=each.__getitem__, default=-1) for each in due]
            asks = self._try(rows, chances, tries, best, asks, seconds)
        self._rests = not any(asks)
        return asks

    def _try(
        self,
        rows: Rows,
        chances: Sequence[Sequence[Chances]],
        tries: Sequence[int],
        best: Choice,
        asks: list[Asks],
        seconds: Seconds,
    ) -> list[Asks]:
        """The drafters of `tries` first, where that may pay. -1: none for a row."""
        hopes = [
            [
                [(SUREST if drafts else GOOD) ** n for n in range(1, 1 + self.most)]
                if at == tried
                else known
                for at, known in enumerate(own)
            ]
            for own, tried, drafts in zip(chances, tries, best.counts, strict=True)
        ]
        hopeful, tried = self._best_of(hopes, self._rows, seconds), list(asks)
        for at, (source, pick, drafts) in enumerate(
            zip(tries, hopeful.picks, hopeful.counts, strict=True)
        ):
            if source == pick and drafts:
                first = Ask(pick, drafts if best.counts[at] else 1)
                tried[at] = (first, *(ask for ask in asks[at] if ask.source != pick))
        counts = [own[0].drafts if own else 0 for own in tried]
        costs = self.costs[frozenset(own[0].source for own in tried if own)]
        price = costs.took(seconds, sum(counts), max(counts)) / seconds(0) - best.longer
        price += 0.0 if any(best.counts) else costs.aside / seconds(0)  # and before the next pass
        affordable = tried != asks and self.saved >= min(price, SAVED)
        for at, source in enumerate(tries):
            if source >= 0 and (odds := rows[at][source]):
                often = LONGEST_REST if best.counts[at] else REFUSED
                odds.due = self.steps + often - self.steps % often
                if affordable and not best.counts[at]:
                    odds.due = self.steps + AWAITED
        self.saved -= price if affordable else 0.0
        return tried if affordable else asks

    def _best_of(self, chances: Sequence[Sequence[Chances]], rows: int, seconds: Seconds) -> Choice:
        held = [[*map(sum, row)] for row in chances]
        best = Choice([0] * len(held), [0] * len(held), rows * MARGIN)
        able = sorted({at for row in held for at, most in enumerate(row) if most})
        for kind in chain(*(combinations(able, 1 + size) for size in range(len(able)))):
            picks = [max(kind, key=row.__getitem__) for row in held]
            own = [row[pick] for row, pick in zip(chances, picks, strict=True)]
            if len({pick for pick, drafts in zip(picks, own, strict=True) if drafts}) < len(kind):
                continue  # fewer drafters are enough
            free = sum(log1p(row[pick]) for row, pick in zip(held, picks, strict=True))
            if free <= best.gain:  # even if drafts took no time
                continue
            counts, gain, longer = fastest(own, rows, self.costs[frozenset(kind)], seconds)
            if gain > best.gain:
                best = Choice(picks, counts, gain, longer)
        return best

    def rested(self) -> None:
        self.steps += 1
        self.saved = min(SAVED, self.saved + ALLOWANCE)
        for costs in self.costs.values():
            costs.forget()

    def learn(self, source: int, row: RowAcceptance, drafts: int, held: int) -> None:
        self.sources[source].learn(row, drafts, held)
        if not row.trusted:
            rest = min(LONGEST_REST, 1 << row.missed - MISSED_PASSES)
            row.due = max(row.due, self.steps + rest)
        self._rests = False
        self.saved = min(SAVED, self.saved + held / self._rows)


def _asks(chances: Sequence[Chances], pick: int, drafts: int) -> Asks:
    """A row's drafter, then an earlier one in case it has no guess, for as many drafts as gain at
    least as much as the last one of the first."""

    def shares(own: Chances) -> list[float]:
        return [c / n for c, n in zip(own, accumulate(own, initial=1.0), strict=False)]

    first = Ask(pick, drafts)
    other = max(range(pick), key=lambda at: sum(chances[at]), default=None)
    if other is None:
        return (first,)
    least = shares(chances[pick])[drafts - 1]
    more = sum(share >= least for share in shares(chances[other]))
    return (first, Ask(other, more)) if more else (first,)
