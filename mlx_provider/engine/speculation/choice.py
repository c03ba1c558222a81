"""The drafters and drafts of a step that make its rows fastest. Imports no mlx."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log

import numpy as np
from numpy.typing import NDArray

from .asks import Ask, Asks
from .costs import Kind, Step

MARGIN = log(1.08)
"""Least expected gain, as the logarithm of a rate, because the estimates are not exact."""
PACE_SHARE = 0.75
"""Least share of its pace that each row keeps, however much drafts help other rows."""

Floats = NDArray[np.float64]


class Prospects:
    """The expected gain of each row from each drafter."""

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


def best_of(prospects: Prospects, step: Callable[[Kind], Step]) -> Choice:
    """The drafters and drafts with the greatest product of all rows' rates, if the gain is
    sufficient. `step`: with drafts of a kind."""
    plain, none = step(frozenset()), [0] * len(prospects.held)
    best = Choice(plain, none, none, plain.rows * MARGIN)
    for kind in _kinds(prospects.drafters):
        picks = prospects.likeliest(kind)
        if len({*picks.tolist()} - {-1}) < len(kind):
            continue  # fewer drafters are enough
        found = fastest(prospects, picks, step(frozenset(kind)))
        if found.gain > best.gain:
            best = found
    return best


def _kinds(able: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(able) + 1):
        yield from combinations(able, size)


def fastest(prospects: Prospects, picks: NDArray[np.int_], step: Step) -> Choice:
    """The number of drafts with the greatest product of all rows' rates, if the gain is sufficient;
    a sum would let rows with poor drafts pay for the others. `picks`: the drafter of each row;
    -1: none."""
    counts, most = np.zeros(len(picks), np.int_), step.rows * MARGIN
    able = np.flatnonzero(picks >= 0)
    chosen = able, picks[able]
    if np.log1p(prospects.held[chosen]).sum() > most:  # if drafts took no time
        gains, tokens = prospects.gains[chosen], prospects.tokens[chosen]
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
