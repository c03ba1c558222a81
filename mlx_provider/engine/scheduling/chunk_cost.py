"""How long a prefill chunk takes, learnt from the last ones. Imports no mlx."""

from __future__ import annotations

FIRST_RATE = 2000.0
"""Prefill rate assumed before the first measurement, tokens per second."""
MEMORY = 0.85
"""Weight of what was known at each new measurement, for the level of the times."""
LINE_MEMORY = 0.9
"""The same for the slope, which noise touches more and which moves slowly."""
SPREAD = 0.15
"""Standard deviation of chunk sizes, as a share of their mean, from which a line is fitted."""
MOSTLY_FIXED = 0.9
"""Largest share of a chunk's time taken for fixed: a noisy fit promises no free tokens."""
SPIKE = 3.0
"""Times the expected duration above which a measurement is a disturbance, not a cost."""


class ChunkTime:
    """Seconds of a chunk as `fixed + per_token * tokens`: a line through recent measurements.

    The fixed part (reading the weights) is why ever smaller chunks do not help: a rate alone
    would take it for a cost of the tokens, and shrink the chunks to nothing.
    """

    def __init__(self) -> None:
        self.fixed = 0.0
        self.per_token = 1 / FIRST_RATE
        self.count = 0
        """Chunks measured so far."""
        self._level = Moments(MEMORY)
        self._line = Moments(LINE_MEMORY)

    def __call__(self, tokens: float) -> float:
        """Expected seconds of a chunk."""
        return self.fixed + self.per_token * tokens

    @property
    def usual(self) -> float:
        """Mean tokens of recent chunks; 0 before the first."""
        return self._level.tokens

    def tokens(self, seconds: float) -> int:
        """Tokens of a chunk that takes so long; 0 where the fixed part alone takes longer."""
        return max(0, int((seconds - self.fixed) / self.per_token))

    def measured(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk."""
        if self.count > 1:
            seconds = min(seconds, SPIKE * self(tokens))
        self.count += 1
        self._level.add(tokens, seconds)
        self._line.add(tokens, seconds)
        n, t = self._level.tokens, self._level.seconds
        slope = self._line.slope
        if slope is not None:
            self.per_token = min(max(slope, (1 - MOSTLY_FIXED) * t / n), t / n)
            self.fixed = max(0.0, t - self.per_token * n)
            return
        # sizes too alike for a line: the old one, scaled to the recent level
        scale = t / self(n)
        self.fixed *= scale
        self.per_token *= scale


class Moments:
    """Fading means of chunk sizes, their times, and what a line through them needs."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Take in one chunk."""
        one = (1, tokens, seconds, tokens * tokens, tokens * seconds)
        known = (self._weight, self._n, self._t, self._nn, self._nt)
        faded = [self._memory * old + new for old, new in zip(known, one, strict=True)]
        self._weight, self._n, self._t, self._nn, self._nt = faded

    @property
    def tokens(self) -> float:
        """Mean size; 0 before the first."""
        return self._n / self._weight if self._weight else 0.0

    @property
    def seconds(self) -> float:
        """Mean time; 0 before the first."""
        return self._t / self._weight if self._weight else 0.0

    @property
    def slope(self) -> float | None:
        """Seconds per token; `None` where sizes are too alike to tell."""
        if not self._weight:
            return None
        n, t = self.tokens, self.seconds
        variance = self._nn / self._weight - n * n
        if variance <= (SPREAD * n) ** 2:
            return None
        return (self._nt / self._weight - n * t) / variance
