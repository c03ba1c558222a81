"""How many drafts are worth their place in a pass. Imports no mlx.

A draft costs what a wider pass costs, and saves a whole one where it holds. Both are known: the
first from the curve that was timed at load, the second from what held of each row's last drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST = 7
"""Drafts of a row in one pass: fused attention takes 8 queries at most (Metal, mlx 0.32.4)."""
MARGIN = 1.05
"""Times the plain rate that drafting must promise: what is known of either is not exact."""
DECAY = 0.9
"""Weight of what held before at each new pass."""
BELIEF = 2.0
"""Tries that a row is credited with before its first, at what held for other rows."""
HOPE = 0.7
"""Share of drafts that is expected to hold before anything is known."""
LONGEST_REST = 64
"""Steps after which a row that draws no gain is tried again, at the latest."""


@dataclass
class Odds:
    """How often drafts held, of late."""

    held: float = 0.0
    tried: float = 0.0

    def learn(self, held: int, tried: int) -> None:
        """Of drafts in a row, the first `held` did; no draft behind a wrong one was tried."""
        self.held = DECAY * self.held + held
        self.tried = DECAY * self.tried + tried

    def share(self, belief: float) -> float:
        """Expected share that holds; `belief`: what holds for others."""
        return (self.held + BELIEF * belief) / (self.tried + BELIEF)


@dataclass
class RowOdds:
    """What is known of one row."""

    odds: Odds = field(default_factory=Odds)
    rest: int = 0
    """Steps for which nothing is drafted for it."""
    last_rest: int = 0

    def gained(self) -> None:
        """Its drafts were worth it."""
        self.rest = self.last_rest = 0

    def failed(self) -> None:
        """There were no drafts, or none held: the next try comes later each time."""
        self.last_rest = min(LONGEST_REST, max(1, 2 * self.last_rest))
        self.rest = self.last_rest


@dataclass
class Policy:
    """What is known of all rows."""

    most: int = MOST
    everyone: Odds = field(default_factory=Odds)
    per_draft: float = 0.0
    """Seconds that one round of guesses takes."""
    aside: float = 0.0
    """Seconds for which the device idles in a step with drafts: tokens are read before it."""

    def wanted(
        self, rows: Sequence[RowOdds], others: int, seconds: Callable[[int], float]
    ) -> list[int]:
        """Drafts for each of the rows, 0 to `most`: those with which most tokens come in a second.

        others: rows that cannot draft; seconds: of a pass with so many tokens more than rows.
        """
        none = [0] * len(rows)
        awake = [i for i, row in enumerate(rows) if not row.rest]
        if not awake:
            return none
        belief = self.everyone.share(HOPE)
        shares = {i: min(0.99, rows[i].odds.share(belief)) for i in awake}
        tokens = float(len(rows) + others)
        best, best_rate = none, MARGIN * tokens / seconds(0)
        counts, chance = list(none), dict(shares)
        for extra in range(1, self.most * len(awake) + 1):
            open_rows = [i for i in awake if counts[i] < self.most]
            if not open_rows:
                break
            likeliest = max(open_rows, key=lambda i: chance[i])
            tokens += chance[likeliest]
            counts[likeliest] += 1
            chance[likeliest] *= shares[likeliest]
            rate = tokens / (seconds(extra) + self.aside + self.per_draft * max(counts))
            if rate > best_rate:
                best, best_rate = list(counts), rate
        return best

    def rested(self, rows: Sequence[RowOdds]) -> None:
        """A step has passed."""
        for row in rows:
            row.rest = max(0, row.rest - 1)

    def learn(self, row: RowOdds, drafts: int, held: int) -> None:
        """Of a row's drafts, so many held."""
        if not drafts:
            row.failed()
            return
        tried = min(drafts, held + 1)
        row.odds.learn(held, tried)
        self.everyone.learn(held, tried)
        if held:
            row.gained()
        else:
            row.failed()

    def timed(self, aside: float, guessing: float, rounds: int) -> None:
        """A step with drafts left the device idle for `aside` seconds beside `guessing`."""
        self.aside = _followed(self.aside, aside)
        if rounds:
            self.per_draft = _followed(self.per_draft, guessing / rounds)


def _followed(known: float, seconds: float) -> float:
    return seconds if not known else DECAY * known + (1 - DECAY) * seconds
