"""What drafts were measured to take, and what a step with drafts takes. Imports no mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

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
        """Count a step."""
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
