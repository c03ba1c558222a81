"""When engines of a simulation end and come back."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

DAY = 86_400.0


@dataclass(frozen=True, order=True)
class Fault:
    at: float
    """Seconds."""
    engine: int
    back: bool
    """Whether it comes back, with an empty cache, rather than ends."""
    drained: bool = False
    """Whether it ends after what it holds, asked nothing more (`serve --drain`)."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong."""

    deaths: float = 0.0
    """Of each engine in a day, each with all that it held."""
    down: float = 120.0
    """Seconds until an engine is back."""
    rolling: float | None = None
    """Seconds after which all engines are restarted with `--drain`, one after the other."""

    def within(self, engines: int, span: float, seed: int) -> list[Fault]:
        """All faults in the first `span` seconds, by time."""
        random, found = Random(seed), []
        for engine in range(engines if self.deaths else 0):
            at = random.expovariate(self.deaths / DAY)
            while at < span:
                found += self._out(engine, at)
                at += self.down + random.expovariate(self.deaths / DAY)
        if self.rolling is not None:
            for engine in range(engines):
                found += self._out(engine, self.rolling + engine * self.down, drained=True)
        return sorted(found)

    def _out(self, engine: int, at: float, *, drained: bool = False) -> list[Fault]:
        return [Fault(at, engine, False, drained), Fault(at + self.down, engine, True)]
