"""The time that an unused model stays in memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

PINNED = -1.0
"""The model never leaves."""


@dataclass
class KeepAlive:
    """The longest `keep_alive` of the config entries that have used a model."""

    seconds: float | None = None
    """Seconds after its last use. `None`: until another model needs its memory."""
    pinned: bool = False

    def ask(self, keep_alive: float | None) -> None:
        """`keep_alive` of an entry: seconds, `PINNED`, or `None`, which has no effect."""
        if keep_alive == PINNED:
            self.pinned = True
        elif keep_alive is not None:
            self.seconds = max(self.seconds or 0.0, keep_alive)

    def ends(self, used: float) -> float:
        """When a model last used at `used` leaves although nothing needs its memory; `inf`:
        never."""
        return inf if self.pinned or self.seconds is None else used + self.seconds
