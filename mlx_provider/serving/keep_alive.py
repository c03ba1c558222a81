"""How long a model stays in memory while nobody uses it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

PINNED = -1.0
"""As `keep_alive`: it stays, whatever others need."""


@dataclass
class KeepAlive:
    """What the config entries that have used a model ask for; the longest time counts."""

    seconds: float | None = None
    """After its last use; `None`: until another model needs its memory."""
    pinned: bool = False

    def ask(self, keep_alive: float | None) -> None:
        """One more entry uses it: seconds, `PINNED`, or `None`, which leaves it to the others."""
        if keep_alive == PINNED:
            self.pinned = True
        elif keep_alive is not None:
            self.seconds = max(self.seconds or 0.0, keep_alive)

    def ends(self, used: float) -> float:
        """When a model leaves by itself that was last used at `used`; `inf`: never."""
        return inf if self.pinned or self.seconds is None else used + self.seconds
