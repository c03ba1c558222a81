"""What a forward pass takes: a curve measured at load and refined by passes. Imports no mlx."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

EWMA_DECAY = 0.9
"""Weight of what was known at each new measurement."""
SPIKE = 3.0
"""Times the expected duration above which a measurement is a disturbance, not a cost."""
FARTHEST = 4.0
"""Times what was measured at load, or a part of it, that passes may refine a slope to."""

Points = Sequence[tuple[int, float]]
"""(tokens of a pass, seconds), tokens ascend."""


class Load(NamedTuple):
    """What a pass reads of caches: `keys` for rows that decode, `depth` for a chunk behind it."""

    keys: int = 0
    chunk: int = 0
    depth: int = 0


NO_LOAD = Load()


@dataclass(frozen=True)
class Curve:
    """Seconds of one pass, as timed on this device with this model.

    A pass over `tokens` takes `seconds(tokens)`, plus `per_key(tokens)` for each cached token that
    they attend to. Attention has kernels of its own for few tokens, so it has its own points.
    """

    widths: Points
    """Over short caches; seconds do not fall."""
    depths: Points = ()
    """Seconds longer for each cached token; empty: not measured."""

    def seconds(self, tokens: int) -> float:
        """Between two measured widths, and beyond the last, along a line."""
        at = bisect_left(self.widths, (tokens, 0.0))
        if at == 0:
            return self.widths[0][1]
        (n, s), (m, t) = self._line(at)
        return t + (tokens - m) * (t - s) / (m - n)

    def per_key(self, tokens: float) -> float:
        """Seconds for each cached token that `tokens` of one row attend to."""
        return sum(part * self.depths[at][1] for at, part in self.parts(tokens))

    def parts(self, tokens: float) -> list[tuple[int, float]]:
        """`per_key` as a sum: positions in `depths`, and how often each counts. Between two points
        along a line; beyond the last as much as the tokens, which is the most that it may be."""
        if not self.depths:
            return []
        at = bisect_left(self.depths, (tokens, 0.0))
        if at == 0:
            return [(0, 1.0)]
        if at == len(self.depths):
            return [(at - 1, tokens / self.depths[-1][0])]
        n, m = self.depths[at - 1][0], self.depths[at][0]
        part = (tokens - n) / (m - n)
        return [(at - 1, 1 - part), (at, part)]

    @classmethod
    def through(cls, short: Points, deep: Points, depth: int) -> Curve:
        """The curve through measurements over short caches, and of some of these widths over a
        cache of `depth` tokens."""
        flat = [(n, max(s for m, s in short if m <= n)) for n, _ in short]
        beside = dict(short)
        return cls(flat, [(n, max(0.0, s - beside[n]) / depth) for n, s in deep])

    def _line(self, at: int) -> tuple[tuple[float, float], tuple[int, float]]:
        """Two points around the `at`-th width; beyond the last, or with one alone, from nothing."""
        if at < len(self.widths):
            return self.widths[at - 1], self.widths[at]
        before = self.widths[-2] if len(self.widths) > 1 else (0, 0.0)
        return before, self.widths[-1]


UNMEASURED = Curve(((1, 0.01), (2048, 1.0)))
"""Taken where nothing was timed: 2,000 tokens a second, a hundred passes at most."""


class Costs:
    """Seconds of what a step may run, at the device's present pace."""

    def __init__(self, curve: Curve = UNMEASURED) -> None:
        self.curve = self._first = curve
        self.pace = 1.0
        """Seconds that pass for each of the curve's: other load, heat, work of the host."""
        self._count = 0

    def pass_of(self, rows: int, keys: int, chunk: int = 0, depth: int = 0) -> float:
        """A pass of `rows` that decode and hold `keys` tokens, and of a chunk behind `depth`."""
        curve = self.curve
        attended = keys * curve.per_key(1) if keys else 0.0
        if chunk and depth:
            attended += depth * curve.per_key(chunk)
        return self.pace * (curve.seconds(rows + chunk) + attended)

    def measured(self, expected: float, seconds: float, loads: Iterable[Load] = ()) -> None:
        """Take in how long passes took, of which `expected` was expected.

        What attention over caches was expected to take of it changes the slopes, the rest the pace.
        """
        if expected <= 0 or seconds <= 0:
            return
        self._count += 1
        decay = min(EWMA_DECAY, 1 - 1 / self._count)
        ratio = min(seconds / expected, SPIKE)
        shares = self._shares(loads, expected)
        rest = max(0.0, 1 - sum(shares))
        norm = rest**2 + sum(share**2 for share in shares)
        self.pace *= (decay + (1 - decay) * ratio) ** (rest / norm)
        if any(shares):
            times = EWMA_DECAY + (1 - EWMA_DECAY) * ratio
            self._refine([times ** (share / norm) for share in shares])

    def _shares(self, loads: Iterable[Load], expected: float) -> list[float]:
        """Of the expected seconds, those by each slope."""
        depths = self.curve.depths
        shares = [0.0] * len(depths)
        for load in loads:
            for tokens, keys in ((1, load.keys), (load.chunk, load.depth if load.chunk else 0)):
                for at, part in self.curve.parts(tokens) if keys else ():
                    shares[at] += part * keys * depths[at][1] * self.pace / expected
        return shares

    def _refine(self, times: Sequence[float]) -> None:
        first = self._first.depths
        self.curve = replace(
            self.curve,
            depths=[
                (n, min(max(slope * each, known / FARTHEST), known * FARTHEST))
                for (n, slope), each, (_, known) in zip(
                    self.curve.depths, times, first, strict=True
                )
            ],
        )
