"""Decides how many drafts pay in a pass, and which drafter gives them. Imports no mlx.

A draft costs the extra time of a wider pass, as measured (`DraftCosts`), and saves a whole pass if
it is accepted. Each row has an acceptance rate for each drafter. A drafter that does not pay for a
row is parked: it is tried again with one draft, after rests that double. Drafters are named by
their index, the best first.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from math import inf, log, log1p
from operator import mul
from typing import NamedTuple

from ...records.extensions import MOST_DRAFTS

Kind = frozenset[int]
"""The drafters of a pass."""
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
BELIEF = 2.0
"""Prior weight, in drafts, of a row at the rate of other rows."""
HOPE, GOOD, SUREST = 0.7, 0.9, 0.99
"""Acceptance rates: assumed before any measurement; assumed in a trial; the highest estimate."""
MISSED_PASSES = 3
"""Passes in sequence without an accepted draft, after which the drafter is parked for the row."""
LONGEST_REST = 96
"""Most steps between the trials of a parked drafter. The trials of all rows coincide."""


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


def fastest(
    chances: Sequence[Chances],
    rows: int,
    costs: DraftCosts,
    seconds: Seconds,
    least: float = PACE_SHARE,
) -> tuple[list[int], float]:
    """The number of drafts of each row with the greatest product of all rows' rates, if the gain is
    sufficient; a sum would let rows with poor drafts pay for the others. With the duration as a
    multiple of one without drafts. `rows`: of the pass, also those that cannot draft; `least`:
    share of its pace that each keeps."""
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
    return best, times


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

    def chance(self, row: AcceptanceRate) -> float:
        return row.share(self.share(HOPE))

    def learn_both(self, row: AcceptanceRate, held: int, tried: int = 1) -> None:
        row.learn(held, tried)
        self.learn(held, tried)


@dataclass
class RowAcceptance(AcceptanceRate):
    missed: int = 0
    parked: bool = False
    rest: int = 1
    due: int = 0
    """Step of the next trial, if parked; all are multiples of their rests."""

    def learn(self, held: int, tried: int) -> None:
        if held and self.parked and self.missed >= MISSED_PASSES:
            self.held = self.tried = 1.0  # its text has changed in kind
        super().learn(held, tried)
        if held and not self.parked:
            self.rest = max(1, self.rest // 2)
        self.missed = 0 if held else self.missed + 1
        self.parked = self.parked and not held

    def park(self, step: int) -> None:
        self.parked, self.due = True, -(-(step + self.rest) // self.rest) * self.rest
        self.rest = min(LONGEST_REST, 2 * self.rest)


Row = Sequence[RowAcceptance | None]
"""Of each drafter; `None`: it cannot draft for the row."""


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

    def wanted(self, rows: Sequence[Row], others: int, seconds: Seconds) -> list[Asks]:
        """The drafters to ask for each row. `others`: rows without drafters."""
        chances = [[self._chances(at, own) for at, own in enumerate(row)] for row in rows]
        if not any(map(any, chances)):
            return [()] * len(rows)
        picks = [max(range(len(own)), key=[*map(sum, own)].__getitem__) for own in chances]
        picked = [own[pick] for own, pick in zip(chances, picks, strict=True)]
        kind = frozenset(pick for pick, own in zip(picks, picked, strict=True) if own)
        counts, _ = fastest(picked, len(rows) + others, self.costs[kind], cache(seconds))
        each = zip(rows, picks, counts, strict=True)
        return [self._asks(row, pick, drafts) for row, pick, drafts in each]

    def _chances(self, source: int, row: RowAcceptance | None) -> Chances:
        if row is None or (row.parked and row.due > self.steps):
            return ()
        share = GOOD if row.parked else self.sources[source].chance(row)
        return [share**drafts for drafts in range(1, 1 + self.most)]

    def _asks(self, row: Row, pick: int, drafts: int) -> Asks:
        """The drafter `pick`, then the others that are not parked, each asked if those before it
        have no guess; now and then `pick` is the last. Parks those that do not pay."""
        others = [at for at, own in enumerate(row) if own and not own.parked and at != pick]
        trial = bool((first := row[pick]) and first.parked)
        for at, own in enumerate(row):
            if own and own.due <= self.steps and (not drafts or (trial and at == pick)):
                own.park(self.steps)
        if not drafts:
            return ()
        asks = [Ask(at, drafts) for at in others]
        last = bool(asks) and not trial and self.steps % LONGEST_REST == 0
        asks.insert(len(asks) if last else 0, Ask(pick, 1 if trial and not asks else drafts))
        return tuple(asks)

    def known_drafts(self, chances: Sequence[float], rows: int, seconds: Seconds) -> int:
        """How many drafts of predicted text of one row gain more than all rows lose. `chances`:
        acceptance of each draft if those before it are accepted; `rows`: rows of the pass."""
        own = [*accumulate(chances[: self.most], mul)]
        (best,), _ = fastest([own], rows, self.costs[KNOWN_TEXT], seconds, least=0.0)
        return best

    def rested(self) -> None:
        self.steps += 1
        for costs in self.costs.values():
            costs.forget()

    def learn(self, source: int, row: RowAcceptance, drafts: int, held: int) -> None:
        self.sources[source].learn_both(row, held, min(max(1, drafts), held + 1))
        if row.missed >= MISSED_PASSES and not row.parked:
            row.park(self.steps)
