"""What drafts take, by measurement, and the drafters and drafts of a step that make its rows
fastest. Imports no mlx."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
"""In place of a drafter: text predicted by a grammar or a forecast."""
LEAST_PASS_FACTOR = 0.1
"""Least factor on the expected duration of a pass with drafts: if kernels run while they are
launched, most of the pass is over by then."""
Kind = frozenset[int]
"""The drafters of one pass."""
KNOWN_TEXT: Kind = frozenset({KNOWN})
Seconds = Callable[[int], float]
"""Duration of a pass by the number of its extra tokens."""
MARGIN = log(1.08)
"""Least expected gain, as the logarithm of a rate, because the estimates are not exact."""
PACE_SHARE = 0.75
"""Least share of its pace that each row keeps, however much drafts help other rows."""
Floats = NDArray[np.float64]


class Ask(NamedTuple):
    source: int
    drafts: int


Asks = tuple[Ask, ...]
"""The drafters of a row in one step. The next one is asked if the one before has no guess."""


def within(asks: Asks, most: int) -> Asks:
    return tuple(Ask(ask.source, min(ask.drafts, most)) for ask in asks) if most > 0 else ()


class Passes:
    """Expected seconds of passes by the number of their drafts, each of which is asked for once."""

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = cache(seconds)
        self._first = np.zeros(0)

    def first(self, count: int) -> NDArray[np.float64]:
        if self._first.size < count:
            self._first = np.array([*map(self.seconds, range(1, 1 + count))])
        return self._first[:count]


@dataclass
class DraftCosts:
    per_draft: float = 0.0
    aside: float = 0.0
    """Seconds that the device idles in a step with drafts, because tokens are read first."""
    slower: dict[int, float] = field(default_factory=dict)
    """Measured over expected duration of passes, by the bit length of their number of drafts."""

    def factor(self, bits: int) -> float:
        """Factor of the measured passes with the most drafts, up to this number. 1: none."""
        return next((self.slower[n] for n in range(bits, 0, -1) if n in self.slower), 1.0)

    def step(self, rows: int, passes: Passes, most: int) -> Step:
        """A step in which each row has at most `most` drafts. Measured passes with a similar number
        of drafts correct the expected durations."""
        times = [self.factor(bits) for bits in range((most * rows).bit_length() + 1)]
        return Step(rows, passes, times, self.aside, self.per_draft)

    def timed(self, aside: float, guessing: float, rounds: int) -> None:
        """The device idled for `aside` seconds, in addition to `guessing`."""
        self.aside = _followed(self.aside, aside)
        if rounds:
            self.per_draft = _followed(self.per_draft, guessing / rounds)

    def passed(self, drafts: int, times: float) -> None:
        bits = drafts.bit_length()
        known = self.factor(bits)
        if bits in self.slower:  # the first pass may have compiled kernels
            known = QUICK * known + (1 - QUICK) * max(LEAST_PASS_FACTOR, min(times, SPIKE * known))
        self.slower[bits] = known

    def forget(self) -> None:
        self.aside *= FORGOTTEN
        self.per_draft *= FORGOTTEN
        for bits, times in self.slower.items():
            self.slower[bits] = 1 + FORGOTTEN * (times - 1)


@dataclass(frozen=True)
class Step:
    rows: int
    passes: Passes
    times: Sequence[float]
    aside: float
    per_draft: float

    @property
    def plain(self) -> float:
        return self.passes.seconds(0) * self.times[0]

    def took(self, drafts: int, rounds: int) -> float:
        if not drafts:
            return self.plain
        seconds = self.passes.seconds(drafts) * self.times[drafts.bit_length()]
        return seconds + self.aside + self.per_draft * rounds

    def took_each(self, rounds: NDArray[np.int_]) -> NDArray[np.float64]:
        """The same for 1, 2, ... drafts. `rounds`: of each."""
        bits = np.frexp(np.arange(1, 1 + rounds.size))[1]
        seconds = self.passes.first(rounds.size) * np.array(self.times)[bits]
        found: NDArray[np.float64] = seconds + self.aside + self.per_draft * rounds
        return found


def _followed(known: float, seconds: float) -> float:
    if not known or SPIKE * seconds < known:
        return seconds
    return DECAY * known + (1 - DECAY) * min(seconds, RISE * known)


class ExpectedGain:
    def __init__(self, chances: Floats) -> None:
        """`chances`: (rows, drafters, drafts), that a draft and all before it are accepted. 0: the
        drafter is not asked."""
        self.chances = chances
        held = np.cumsum(chances, axis=2)
        self.held: Floats = held[..., -1]
        """(rows, drafters): expected number of accepted drafts."""
        ones = np.ones((*chances.shape[:2], 1))
        self.tokens = np.cumsum(np.concatenate([ones, chances], axis=2), axis=2)
        """(rows, drafters, 1 + drafts): tokens of a pass by the number of drafts."""
        self.shares = chances / self.tokens[..., :-1]
        """Share of a row's tokens that each further draft adds."""
        self.gains = np.log1p(self.shares)

    @property
    def drafters(self) -> list[int]:
        return np.flatnonzero(self.held.any(axis=0)).tolist()

    def likeliest(self, kind: Sequence[int]) -> NDArray[np.int_]:
        """For each row, the drafter of `kind` with the most expected accepted drafts. -1: none."""
        held = self.held[:, kind]
        best = np.argmax(held, axis=1)
        return np.where(held.any(axis=1), np.asarray(kind)[best], -1)

    def asks(self, row: int, pick: int, drafts: int) -> Asks:
        """A row's drafter, then an earlier one in case it has no guess, for as many drafts as gain
        at least as much as the last one of the first."""
        first = Ask(pick, drafts)
        if not self.held[row, :pick].any():
            return (first,)
        other = int(np.argmax(self.held[row, :pick]))
        more = int(np.sum(self.shares[row, other] >= self.shares[row, pick, drafts - 1]))
        return (first, Ask(other, more)) if more else (first,)


@dataclass(frozen=True)
class Choice:
    step: Step
    picks: Sequence[int]
    counts: Sequence[int]
    gain: float
    """Logarithm of the product of all rows' rates, over that without drafts."""

    @property
    def seconds(self) -> float:
        return self.step.took(sum(self.counts), max(self.counts, default=0))


def best_of(gain: ExpectedGain, step: Callable[[Kind], Step]) -> Choice:
    """The drafters and drafts with the greatest product of all rows' rates, if the gain is
    sufficient. `step`: with drafts of a kind."""
    plain, none = step(frozenset()), [0] * len(gain.held)
    best = Choice(plain, none, none, plain.rows * MARGIN)
    for kind in _kinds(gain.drafters):
        picks = gain.likeliest(kind)
        if len({*picks.tolist()} - {-1}) < len(kind):
            continue  # fewer drafters are enough
        found = fastest(gain, picks, step(frozenset(kind)))
        if found.gain > best.gain:
            best = found
    return best


def _kinds(able: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(able) + 1):
        yield from combinations(able, size)


def fastest(gain: ExpectedGain, picks: NDArray[np.int_], step: Step) -> Choice:
    """The number of drafts with the greatest product of all rows' rates, if the gain is sufficient;
    a sum would let rows with poor drafts pay for the others. `picks`: the drafter of each row;
    -1: none."""
    counts, most = np.zeros(len(picks), np.int_), step.rows * MARGIN
    able = np.flatnonzero(picks >= 0)
    chosen = able, picks[able]
    if np.log1p(gain.held[chosen]).sum() > most:  # if drafts took no time
        gains, tokens = gain.gains[chosen], gain.tokens[chosen]
        order = np.argsort(-gains, axis=None, kind="stable")  # of a row, each gains less
        rows, rounds = np.divmod(order, gains.shape[1])
        longer = step.took_each(np.maximum.accumulate(rounds) + 1) / step.plain
        gained = np.cumsum(gains.ravel()[order]) - step.rows * np.log(longer)
        least = PACE_SHARE * longer
        while gained[drafts := int(np.argmax(gained))] > most:
            had = np.bincount(rows[: drafts + 1], minlength=len(able))
            slowest = tokens[np.arange(len(able)), had].min()
            slowest = min(slowest, 1.0) if len(able) < step.rows else slowest  # without drafts
            if slowest >= least[drafts]:
                counts[able], most = had, float(gained[drafts])
                break
            gained[: drafts + 1][least[: drafts + 1] > slowest] = -np.inf  # and with fewer drafts
    return Choice(step, np.maximum(picks, 0).tolist(), counts.tolist(), most)
