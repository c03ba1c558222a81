"""Time of a forward pass: a curve measured at load and refined by passes. Imports no mlx."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

EWMA_DECAY = 0.9
"""Weight of the old value at each new measurement."""
SPIKE = 3.0
"""A measurement above this multiple of the expected duration is ignored as a disturbance."""
FARTHEST = 4.0
"""Passes may change a slope at most by this factor, up or down, from its measurement at load."""

Points = Sequence[tuple[int, float]]
"""(tokens of a pass, seconds), tokens ascend."""


class Load(NamedTuple):
    """Cached tokens that a pass reads: `keys` for decoding rows, `depth` before its chunk."""

    keys: int = 0
    chunk: int = 0
    depth: int = 0


NO_LOAD = Load()


@dataclass(frozen=True)
class Curve:
    """Seconds of one pass, measured on this device with this model.

    A pass over `tokens` takes `seconds(tokens)`, plus `per_key(tokens)` for each cached token that
    they attend to. Attention has separate kernels for few tokens, so it has separate points.
    """

    widths: Points
    """Over short caches. The seconds do not decrease."""
    depths: Points = ()
    """Extra seconds per cached token. Empty: not measured."""

    def __post_init__(self) -> None:
        """Curves from JSON, which has lists, equal others."""
        for name in ("widths", "depths"):
            object.__setattr__(self, name, tuple((n, s) for n, s in getattr(self, name)))

    def seconds(self, tokens: int) -> float:
        """Linear between two measured widths and beyond the last one."""
        at = bisect_left(self.widths, (tokens, 0.0))
        if at == 0:
            return self.widths[0][1]
        (n, s), (m, t) = self._line(at)
        return t + (tokens - m) * (t - s) / (m - n)

    def per_key(self, tokens: float) -> float:
        """Seconds per cached token that `tokens` of one row attend to."""
        return sum(part * self.depths[at][1] for at, part in self.parts(tokens))

    def parts(self, tokens: float) -> list[tuple[int, float]]:
        """`per_key` as a weighted sum: indices of `depths` with their weights. Linear between two
        points; beyond the last point proportional to the tokens, which is the upper limit."""
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
        """The curve through measurements over short caches, and over a cache of `depth` tokens for
        some widths."""
        flat = [(n, max(s for m, s in short if m <= n)) for n, _ in short]
        beside = dict(short)
        return cls(flat, [(n, max(0.0, s - beside[n]) / depth) for n, s in deep])

    def _line(self, at: int) -> tuple[tuple[float, float], tuple[int, float]]:
        """The two points around the `at`-th width. Beyond the last width, or with only one, the
        line starts at zero."""
        if at < len(self.widths):
            return self.widths[at - 1], self.widths[at]
        before = self.widths[-2] if len(self.widths) > 1 else (0, 0.0)
        return before, self.widths[-1]


UNMEASURED = Curve(((1, 0.01), (2048, 1.0)))
"""Default without measurements: 2,000 tokens per second, at most a hundred passes per second."""


class Costs:
    """Expected seconds of passes at the present pace of the device."""

    def __init__(self, curve: Curve = UNMEASURED) -> None:
        self.curve = self._first = curve
        self.pace = 1.0
        """Factor on the curve's seconds: other load, heat, host work."""
        self._count = 0

    def pass_of(self, rows: int, keys: int, chunk: int = 0, depth: int = 0) -> float:
        """A pass of `rows` decoding rows that hold `keys` tokens, and of a chunk behind `depth`
        tokens."""
        curve = self.curve
        attended = keys * curve.per_key(1) if keys else 0.0
        if chunk and depth:
            attended += depth * curve.per_key(chunk)
        return self.pace * (curve.seconds(rows + chunk) + attended)

    def measured(self, expected: float, seconds: float, loads: Iterable[Load] = ()) -> None:
        """Update the costs with the measured and the expected seconds of passes.

        The expected share of attention over caches changes the slopes; the rest changes the pace.
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
        """The part of the expected seconds that each slope causes."""
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
