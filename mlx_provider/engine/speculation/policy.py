"""Decides how many drafts are worth their place in a pass. Imports no mlx.

A draft costs the extra time of a wider pass and saves a whole pass if it holds. The cost comes from
the calibrated curve and from the measured time of passes with drafts, the benefit from the
acceptance of each row's last drafts. Rows with poor drafts are tried again from time to time,
within an allowance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import compress
from math import log, log1p

MOST_DRAFTS = 7
"""Most drafts of a row in one pass: fused attention accepts at most 8 queries (Metal, mlx
0.32.4)."""
MARGIN = log(1.08)
"""Least expected gain, as the logarithm of a rate, because the estimates are not exact."""
PACE_SHARE = 0.75
"""Least share of its pace that each row keeps, however much drafts help other rows."""
MEMORY = 24
"""Drafts per row that are remembered: few enough to react soon to a change in its text."""
LASTING = 200
"""The same for all rows together."""
DOUBTED = 4.0
"""The same once a draft holds after many that did not."""
BELIEF = 2.0
"""Prior weight of a row, in drafts, at the acceptance rate of other rows."""
HOPE = 0.7
"""Expected acceptance rate before any measurement."""
SELDOM = 0.1
"""The same for what a forecast foretells to begin behind a token that it has not foretold."""
SUREST = 0.99
GOOD = 0.9
"""Assumed acceptance rate of a row that is tried."""
TRIED = 1
"""Drafts of a row in a trial. More would show little more."""
MISSED_PASSES = 3
"""Passes in sequence without an accepted draft, after which a row gets only trials."""
REFUSED = 8
"""Steps until a trial that would not pay off, or that the allowance does not permit, is considered
again: to consider it costs the host more than all else that it decides in a step."""
AWAITED = 2
"""Steps until the result of a trial is known, because passes are planned before the last one is
read."""
LONGEST_REST = 32
"""Most steps between the trials of a row, if the allowance permits."""
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
LEAST_PASS_FACTOR = 0.1
"""Least factor on the expected duration of a pass with drafts. If kernels run while they are
launched, most of the pass is over by then."""


@dataclass
class Odds:
    """Recent acceptance rate of drafts."""

    memory: int = MEMORY
    held: float = 0.0
    tried: float = 0.0

    def learn(self, held: int, tried: int) -> None:
        """Add a result: the first `held` of a row's drafts held. Drafts behind a wrong one do not
        count."""
        kept = (1 - 1 / self.memory) ** tried
        self.held = kept * self.held + held
        self.tried = kept * self.tried + tried

    def doubt(self) -> None:
        """Reduce the weight of the past results."""
        kept = min(1.0, DOUBTED / max(self.tried, DOUBTED))
        self.held, self.tried = kept * self.held, kept * self.tried

    def share(self, belief: float) -> float:
        """Expected acceptance rate. `belief`: the rate of other rows."""
        return min(SUREST, (self.held + BELIEF * belief) / (self.tried + BELIEF))


@dataclass
class RowOdds:
    """Statistics of one row."""

    odds: Odds = field(default_factory=Odds)
    missed: int = 0
    """Passes in sequence without an accepted draft."""
    rest: int = 0
    """Steps until it may be tried again."""
    worth: float = 0.0
    """Plain steps that an accepted draft of its present trial saves."""

    @property
    def trusted(self) -> bool:
        """Whether it may have drafts outside trials."""
        return self.missed < MISSED_PASSES

    def learn(self, held: int, tried: int) -> None:
        """See `Odds`."""
        if held and not self.trusted:
            self.odds.doubt()  # its text may have changed in kind
        self.odds.learn(held, tried)
        self.missed = 0 if held else self.missed + 1
        self.rest = 0 if self.trusted else min(LONGEST_REST, 2 ** (self.missed - MISSED_PASSES))


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

    def seconds_with(self, counts: Sequence[int]) -> float:
        return self.took(sum(counts), max(counts, default=0))


@dataclass
class Policy:
    """Statistics of all rows."""

    most: int = MOST_DRAFTS
    beside_prompts: bool = False
    """Whether a step that prefills may have drafts. They delay the first token of the prompt."""
    everyone: Odds = field(default_factory=lambda: Odds(LASTING))
    foretold: Odds = field(default_factory=lambda: Odds(LASTING))
    """The same for tokens that rows' forecasts foretell, whether they are drafts or not."""
    begins: Odds = field(default_factory=lambda: Odds(LASTING))
    """How often text that a forecast foretells begins behind another token."""
    per_draft: float = 0.0
    """Seconds of one drafting round."""
    aside: float = 0.0
    """Seconds that the device idles in a step with drafts, because tokens are read first."""
    saved: float = SAVED
    """Allowance for trials, in plain steps."""
    slower: dict[int, float] = field(default_factory=dict)
    """Measured over expected duration of passes, by the bit length of their number of drafts."""

    def wanted(
        self, rows: Sequence[RowOdds], others: int, seconds: Callable[[int], float]
    ) -> list[int]:
        """The number of drafts for each row, 0 to `most`, that makes the rows fastest.

        others: rows that cannot draft; seconds: duration of a pass by the number of its extra
        tokens.
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
        """Expected effect of drafts on a single row: the best number per pass (0: none), and the
        speed-up.

        seconds: duration of a pass by its number of drafts; share: assumed acceptance rate;
        per_draft: seconds of one guess.
        """
        held, step = min(SUREST, share), Step(1, seconds, 0.0, per_draft)
        (drafts,) = self._best([held], step)
        tokens = sum(held**each for each in range(drafts + 1))
        return drafts, tokens * step.plain / step.took(drafts, drafts)

    def worthwhile(
        self, chances: Sequence[float], rows: int, seconds: Callable[[int], float]
    ) -> int:
        """How many drafts of one row gain more than all rows lose. 0: none.

        chances: of each draft to hold if those before it do; rows: rows of the pass; seconds:
        duration of a pass by the number of its extra tokens.
        """
        step = Step(rows, self._measured(rows, seconds), self.aside, 0.0)
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
        plain = self._measured(rows, seconds)(0)
        return log1p(chance) > rows * (log1p(self.aside / plain) + MARGIN)

    def learn_beginning(self, row: Odds, *, begun: bool) -> None:
        """Add a token that a row's forecast has not foretold. `begun`: what follows, it does."""
        row.learn(int(begun), 1)
        self.begins.learn(int(begun), 1)

    def learn_forecast(self, row: Odds, *, right: bool) -> None:
        """Add a token that a row's forecast has foretold."""
        row.learn(int(right), 1)
        self.foretold.learn(int(right), 1)

    def _with_tries(
        self, rows: Sequence[RowOdds], shares: Sequence[float], best: list[int], step: Step
    ) -> list[int]:
        """Add one draft for each row with a due trial, if it may pay off and the allowance
        permits."""
        self._spend((step.seconds_with(best) - step.plain) / step.plain)
        due = [not (count or row.rest) for count, row in zip(best, rows, strict=True)]
        if not any(due):
            return best
        hoped = [GOOD if d else share for d, share in zip(due, shares, strict=True)]
        hopeful = self._best(hoped, step)
        tries = [min(TRIED, count) if d else 0 for d, count in zip(due, hopeful, strict=True)]
        counts = [count + more for count, more in zip(best, tries, strict=True)]
        if not any(tries) or not self._afford(_price(counts, best, step)):
            for row in compress(rows, due):
                row.rest = REFUSED
            return best
        for row in compress(rows, tries):
            row.rest = AWAITED
        return counts

    def _spend(self, price: float) -> None:
        """Reduce the allowance. Drafts that are expected to pay off need none and leave no debt."""
        self.saved = max(self.saved - price, min(self.saved, 0.0))

    def _measured(self, rows: int, seconds: Callable[[int], float]) -> Callable[[int], float]:
        """Expected duration of passes, corrected by passes with a similar number of drafts."""
        times = [self._slower(bits) for bits in range((self.most * rows).bit_length() + 1)]
        return lambda drafts: seconds(drafts) * times[drafts.bit_length()]

    def _slower(self, bits: int) -> float:
        """Factor of the measured passes with the most drafts, up to this number. 1: none."""
        return next((self.slower[n] for n in range(bits, 0, -1) if n in self.slower), 1.0)

    def _best(self, shares: Sequence[float], step: Step) -> list[int]:
        """The drafts that maximise the product of all rows' rates, if the gain is sufficient.

        A sum would let rows with poor drafts pay for the others.
        """
        counts, rounds, gain, plain = [0] * len(shares), 0, 0.0, step.plain
        best, most = list(counts), step.rows * MARGIN
        tokens = [1.0] * step.rows
        reach = sum(log((1 - share ** (self.most + 1)) / (1 - share)) for share in shares)
        if reach <= most:  # if drafts took no time
            return best
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
        """Pay this many plain steps for a trial, if the allowance permits."""
        if self.saved < min(price, SAVED):
            return False
        self.saved -= price
        return True

    def rested(self, rows: Sequence[RowOdds]) -> None:
        """Count a step for the rows that rest."""
        self.saved = min(SAVED, self.saved + ALLOWANCE)
        self.aside *= FORGOTTEN
        self.per_draft *= FORGOTTEN
        for bits, times in self.slower.items():
            self.slower[bits] = 1 + FORGOTTEN * (times - 1)
        for row in rows:
            row.rest = max(0, row.rest - 1)

    def learn(self, row: RowOdds, drafts: int, held: int) -> None:
        """Add the result of a row's drafts. 0 drafts: the drafter had none."""
        tried = min(max(1, drafts), held + 1)
        row.learn(held, tried)
        self.everyone.learn(held, tried)
        self.saved = min(SAVED, self.saved + held * row.worth)

    def timed(self, aside: float, guessing: float, rounds: int) -> None:
        """In a step with drafts, the device idled for `aside` seconds, in addition to
        `guessing`."""
        self.aside = _followed(self.aside, aside)
        if rounds:
            self.per_draft = _followed(self.per_draft, guessing / rounds)

    def passed(self, drafts: int, times: float) -> None:
        """A pass with this many drafts took `times` its expected duration."""
        bits = drafts.bit_length()
        known = self._slower(bits)
        if bits in self.slower:  # the first pass may have compiled kernels
            known = QUICK * known + (1 - QUICK) * max(LEAST_PASS_FACTOR, min(times, SPIKE * known))
        self.slower[bits] = known


def _price(counts: Sequence[int], best: Sequence[int], step: Step) -> float:
    """Extra time of a step with trials over the best step, in plain steps.

    If there would be no drafts otherwise, this includes the idle time of the device.
    """
    longer = step.seconds_with(counts) - step.seconds_with(best)
    return (longer + (0.0 if any(best) else step.aside)) / step.plain


def _followed(known: float, seconds: float) -> float:
    if not known or SPIKE * seconds < known:
        return seconds
    return DECAY * known + (1 - DECAY) * min(seconds, RISE * known)
