"""How long a decode step takes, and what prompt tokens that ride add to it. Imports no mlx."""

from __future__ import annotations

import statistics
from collections import deque

STEPS = 15
"""Last steps without riders whose median counts: a disturbed one changes nothing."""
MEMORY = 0.7
"""Weight of what was known at each new measurement of a ride."""
SPIKE = 3.0
"""Times the expected duration above which a measurement is a disturbance, not a cost."""
REFRESHED = 64
"""Rides after which a step without one is due, so that its time stays known."""


class StepTime:
    """Learns from every step that no other pass came after.

    What a riding token adds falls with their number, since part of it is for them all: a size
    computed from it is never too large where it grows, and is put right by the next measurement
    where it shrinks.
    """

    def __init__(self) -> None:
        self.per_rider: float | None = None
        """Seconds that each riding token adds; `None` before the first measurement."""
        self._alone: deque[float] = deque(maxlen=STEPS)
        self._rode = 0
        """Tokens that rode in the last step."""
        self._rides = 0
        """Since a step without riders was last measured."""

    @property
    def alone(self) -> float | None:
        """Seconds of a step without riders; `None` before the first."""
        return statistics.median(self._alone) if self._alone else None

    @property
    def due(self) -> bool:
        """Whether the time of a step without riders should be taken before anybody rides on."""
        return not self._alone or self._rides >= REFRESHED

    def measured(self, seconds: float, rode: int) -> None:
        """Take a step in which so many tokens rode.

        It also waits for the pass before its own, so only the second of two alike counts.
        """
        alike, self._rode = rode == self._rode, rode
        if not rode:
            if alike:
                self._alone.append(seconds)
                self._rides = 0
            return
        self._rides += 1
        alone = self.alone
        if not alike or alone is None:
            return
        known = self.per_rider
        if known is not None:
            seconds = min(seconds, SPIKE * (alone + known * rode))
        added = max(0.0, seconds - alone) / rode
        self.per_rider = added if known is None else MEMORY * known + (1 - MEMORY) * added
