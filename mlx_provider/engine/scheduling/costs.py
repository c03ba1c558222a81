"""What a forward pass takes: a curve measured at load, and one moving average. Imports no mlx."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

EWMA_DECAY = 0.9
"""Weight of what was known at each new measurement."""
SPIKE = 3.0
"""Times the expected duration above which a measurement is a disturbance, not a cost."""


@dataclass(frozen=True)
class Curve:
    """Seconds of one pass, as timed on this device with this model.

    A pass over `tokens` takes `seconds(tokens)`, plus `per_key` for each cached token that it reads
    and `per_pair` for each pair of a new token and a cached one.
    """

    widths: Sequence[tuple[int, float]]
    """(tokens of the pass, seconds) over short caches; tokens ascend, seconds do not fall."""
    per_key: float = 0.0
    per_pair: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Between two measured widths, and beyond the last, along a line."""
        at = bisect_left(self.widths, (tokens, 0.0))
        if at == 0:
            return self.widths[0][1]
        (n, s), (m, t) = self._line(at)
        return t + (tokens - m) * (t - s) / (m - n)

    @classmethod
    def through(
        cls, short: Sequence[tuple[int, float]], deep: Sequence[tuple[int, float]], depth: int
    ) -> Curve:
        """The curve through measurements: (tokens, seconds) over short caches, ascending, and of
        two widths over a cache of `depth` tokens."""
        flat = cls([(n, max(s for m, s in short if m <= n)) for n, _ in short])
        if len(deep) < 2 or not depth:
            return flat
        (few, one), (many, other) = ((n, max(0.0, s - flat.seconds(n)) / depth) for n, s in deep)
        per_pair = max(0.0, other - one) / (many - few)
        return cls(flat.widths, max(0.0, one - few * per_pair), per_pair)

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
        self.curve = curve
        self.pace = 1.0
        """Seconds that pass for each of the curve's: other load, heat, work of the host."""
        self._count = 0

    def pass_of(self, rows: int, keys: int, chunk: int = 0, depth: int = 0) -> float:
        """A pass of `rows` that decode and hold `keys` tokens, and of a chunk behind `depth`."""
        curve = self.curve
        read = curve.per_key * (keys + (depth if chunk else 0))
        attended = curve.per_pair * (keys + chunk * depth)
        return self.pace * (curve.seconds(rows + chunk) + read + attended)

    def measured(self, expected: float, seconds: float) -> None:
        """Take in how long passes took, of which `expected` was expected."""
        if expected <= 0 or seconds <= 0:
            return
        self._count += 1
        decay = min(EWMA_DECAY, 1 - 1 / self._count)
        ratio = min(seconds / expected, SPIKE)
        self.pace *= decay + (1 - decay) * ratio
