"""How many drafts are worth their place in a pass. Imports no mlx.

A draft costs what a wider pass costs, and saves a whole one where it holds. The first is known from
the curve that was timed at load and from how long passes with drafts took beside it, the second
from what held of each row's last drafts. Rows whose drafts are not worth it are tried again now and
then, for which there is an allowance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import compress
from math import log, log1p

MOST_DRAFTS = 7
"""Drafts of a row in one pass: fused attention takes 8 queries at most (Metal, mlx 0.32.4)."""
MARGIN = log(1.08)
"""What drafting must promise, as the logarithm of a rate: what is known of it is not exact."""
PACE_SHARE = 0.75
"""Share of its pace that each row keeps, however much others gain by their drafts."""
MEMORY = 24
"""Drafts of a row that are remembered: few enough to notice soon that its text has changed."""
LASTING = 200
"""The same of all rows."""
DOUBTED = 4.0
"""The same once a draft has held after many that did not."""
BELIEF = 2.0
"""Drafts that a row is credited with before its first, at what held for other rows."""
HOPE = 0.7
"""Share of drafts that is expected to hold before anything is known."""
SUREST = 0.99
GOOD = 0.9
"""Share that may hold for a row that is tried."""
TRIED = 1
"""Drafts of a row in such a try: more would tell little more."""
MISSED_PASSES = 3
"""Passes in a row without a draft that held, after which a row's drafts are tries."""
AWAITED = 2
"""Steps until it is known what held in a try: passes are planned before the last one is read."""
LONGEST_REST = 32
"""Steps between the tries of a row, at most, where the allowance lets it."""
ALLOWANCE = 0.01
"""Share of the time that tries may take."""
SAVED = 6.0
"""Plain steps that can be saved up for tries, by drafts that hold too, and are given at first."""
DECAY = 0.8
"""Weight of known seconds at each new measurement."""
SPIKE = 3.0
"""Times what is known, above which a measurement is a disturbance, or was one."""
RISE = 1.5
"""The same of seconds on the host, where others' work disturbs more."""
QUICK = 0.7
"""Weight of what is known of passes with drafts at each new one."""
FORGOTTEN = 0.9998
"""Share of what was measured that is left a step later: nobody may have tried it since."""
LEAST_TIMES = 0.1
"""Times its expected duration that a pass with drafts takes at the least: where kernels run while
they are launched, most of it is over by then."""


@dataclass
class Odds:
    """How often drafts held, of late."""

    memory: int = MEMORY
    held: float = 0.0
    tried: float = 0.0

    def learn(self, held: int, tried: int) -> None:
        """Of drafts in a row, the first `held` did; no draft behind a wrong one was tried."""
        kept = (1 - 1 / self.memory) ** tried
        self.held = kept * self.held + held
        self.tried = kept * self.tried + tried

    def doubt(self) -> None:
        """What was seen counts for little."""
        kept = min(1.0, DOUBTED / max(self.tried, DOUBTED))
        self.held, self.tried = kept * self.held, kept * self.tried

    def share(self, belief: float) -> float:
        """Expected share that holds; `belief`: what holds for others."""
        return min(SUREST, (self.held + BELIEF * belief) / (self.tried + BELIEF))


@dataclass
class RowOdds:
    """What is known of one row."""

    odds: Odds = field(default_factory=Odds)
    missed: int = 0
    """Passes in a row for which it had no draft that held."""
    rest: int = 0
    """Steps until it may be tried again."""
    worth: float = 0.0
    """Plain steps that are saved where the draft of its present try holds."""

    @property
    def trusted(self) -> bool:
        """Whether it may have drafts beyond tries."""
        return self.missed < MISSED_PASSES

    def learn(self, held: int, tried: int) -> None:
        """See `Odds`."""
        if held and not self.trusted:
            self.odds.doubt()  # its text may be of another kind now
        self.odds.learn(held, tried)
        self.missed = 0 if held else self.missed + 1
        self.rest = 0 if self.trusted else min(LONGEST_REST, 2 ** (self.missed - MISSED_PASSES))


@dataclass(frozen=True)
class Step:
    """What a step with drafts takes."""

    rows: int
    """With or without drafts."""
    seconds: Callable[[int], float]
    """Of a pass with so many drafts."""
    aside: float
    per_draft: float

    @property
    def plain(self) -> float:
        return self.seconds(0)

    def took(self, drafts: int, rounds: int) -> float:
        """Seconds of a step with so many drafts, of one row at most so many as there are rounds."""
        if not drafts:
            return self.plain
        return self.seconds(drafts) + self.aside + self.per_draft * rounds

    def seconds_with(self, counts: Sequence[int]) -> float:
        return self.took(sum(counts), max(counts, default=0))


@dataclass
class Policy:
    """What is known of all rows."""

    most: int = MOST_DRAFTS
    beside_prompts: bool = False
    """Whether there may be drafts in a step that prefills: they make its first token come later."""
    everyone: Odds = field(default_factory=lambda: Odds(LASTING))
    per_draft: float = 0.0
    """Seconds that one round of guesses takes."""
    aside: float = 0.0
    """Seconds for which the device idles in a step with drafts: tokens are read before it."""
    saved: float = SAVED
    """Plain steps that tries may cost."""
    slower: dict[int, float] = field(default_factory=dict)
    """Times its expected duration that a pass takes, by the bits of the number of its drafts."""

    def wanted(
        self, rows: Sequence[RowOdds], others: int, seconds: Callable[[int], float]
    ) -> list[int]:
        """Drafts for each of the rows, 0 to `most`: those with which rows are fastest.

        others: rows that cannot draft; seconds: of a pass with so many tokens more than rows.
        """
        measured = self._measured(len(rows), seconds)
        step = Step(len(rows) + others, measured, self.aside, self.per_draft)
        belief = self.everyone.share(HOPE)
        shares = [row.odds.share(belief) if row.trusted else 0.0 for row in rows]
        best = self._best(shares, step)
        counts = self._with_tries(rows, shares, best, step)
        for row in compress(rows, counts):
            row.worth = 1 / step.rows
        return counts

    def promised(
        self, seconds: Callable[[int], float], share: float, *, per_draft: float = 0.0
    ) -> tuple[int, float]:
        """What drafts would do for a row alone: how many in a pass are best, 0 where none pay, and
        how many times its plain pace that is.

        seconds: of a pass with so many drafts; share: of the drafts that hold, an assumption;
        per_draft: seconds that one guess takes.
        """
        held, step = min(SUREST, share), Step(1, seconds, 0.0, per_draft)
        (drafts,) = self._best([held], step)
        tokens = sum(held**each for each in range(drafts + 1))
        return drafts, tokens * step.plain / step.took(drafts, drafts)

    def _with_tries(
        self, rows: Sequence[RowOdds], shares: Sequence[float], best: list[int], step: Step
    ) -> list[int]:
        """Beside the best drafts one for each row that is due, if that may pay and is allowed."""
        self._spend((step.seconds_with(best) - step.plain) / step.plain)
        due = [not (count or row.rest) for count, row in zip(best, rows, strict=True)]
        if not any(due):
            return best
        hoped = [GOOD if d else share for d, share in zip(due, shares, strict=True)]
        hopeful = self._best(hoped, step)
        tries = [min(TRIED, count) if d else 0 for d, count in zip(due, hopeful, strict=True)]
        counts = [count + more for count, more in zip(best, tries, strict=True)]
        if not any(tries) or not self._afford(_price(counts, best, step)):
            return best
        for row in compress(rows, tries):
            row.rest = AWAITED
        return counts

    def _spend(self, price: float) -> None:
        """Drafts that are thought to pay need no allowance, and leave no debts."""
        self.saved = max(self.saved - price, min(self.saved, 0.0))

    def _measured(self, rows: int, seconds: Callable[[int], float]) -> Callable[[int], float]:
        """What passes take, as far as some with about as many drafts were seen."""
        times = [self._slower(bits) for bits in range((self.most * rows).bit_length() + 1)]
        return lambda drafts: seconds(drafts) * times[drafts.bit_length()]

    def _slower(self, bits: int) -> float:
        """Of the passes seen with the most drafts up to so many; 1: none were seen."""
        return next((self.slower[n] for n in range(bits, 0, -1) if n in self.slower), 1.0)

    def _best(self, shares: Sequence[float], step: Step) -> list[int]:
        """Drafts with which the product of all rows' rates is highest, if that gains enough.

        Not the sum of the rates: rows whose drafts do not hold would pay for the others'.
        """
        counts, rounds, gain, plain = [0] * len(shares), 0, 0.0, step.plain
        best, most = list(counts), step.rows * MARGIN
        tokens = [1.0] * step.rows
        likeliest = [(-log1p(share), at, share) for at, share in enumerate(shares) if share]
        heapify(likeliest)
        for drafts in range(1, self.most * len(likeliest) + 1):
            added, at, chance = likeliest[0]
            counts[at] += 1
            tokens[at] += chance
            gain -= added
            rounds = max(rounds, counts[at])
            chance *= shares[at] if counts[at] < self.most else 0.0
            heapreplace(likeliest, (-log1p(chance / tokens[at]), at, chance))
            longer = step.took(drafts, rounds) / plain
            gained = gain - step.rows * log(longer)
            if gained > most and min(tokens) >= PACE_SHARE * longer:
                best, most = list(counts), gained
        return best

    def _afford(self, price: float) -> bool:
        """Pay so many plain steps for a try, if they have been saved up."""
        if self.saved < min(price, SAVED):
            return False
        self.saved -= price
        return True

    def rested(self, rows: Sequence[RowOdds]) -> None:
        """A step has passed."""
        self.saved = min(SAVED, self.saved + ALLOWANCE)
        self.aside *= FORGOTTEN
        self.per_draft *= FORGOTTEN
        for bits, times in self.slower.items():
            self.slower[bits] = 1 + FORGOTTEN * (times - 1)
        for row in rows:
            row.rest = max(0, row.rest - 1)

    def learn(self, row: RowOdds, drafts: int, held: int) -> None:
        """Of a row's drafts, so many held; 0 drafts: there were none to be had."""
        tried = min(max(1, drafts), held + 1)
        row.learn(held, tried)
        self.everyone.learn(held, tried)
        self.saved = min(SAVED, self.saved + held * row.worth)

    def timed(self, aside: float, guessing: float, rounds: int) -> None:
        """A step with drafts left the device idle for `aside` seconds beside `guessing`."""
        self.aside = _followed(self.aside, aside)
        if rounds:
            self.per_draft = _followed(self.per_draft, guessing / rounds)

    def passed(self, drafts: int, times: float) -> None:
        """A pass with so many drafts took so many times as long as was expected."""
        bits = drafts.bit_length()
        known = self._slower(bits)
        if bits in self.slower:  # the first one may have compiled kernels
            known = QUICK * known + (1 - QUICK) * max(LEAST_TIMES, min(times, SPIKE * known))
        self.slower[bits] = known


def _price(counts: Sequence[int], best: Sequence[int], step: Step) -> float:
    """Plain steps that a step with tries takes longer than the best one.

    Where there would be no drafts otherwise, the device idles before the next step, too.
    """
    longer = step.seconds_with(counts) - step.seconds_with(best)
    return (longer + (0.0 if any(best) else step.aside)) / step.plain


def _followed(known: float, seconds: float) -> float:
    if not known or SPIKE * seconds < known:
        return seconds
    return DECAY * known + (1 - DECAY) * min(seconds, RISE * known)
