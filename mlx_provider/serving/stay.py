"""How long a model stays in memory that nobody uses."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

PINNED = -1.0
"""As `keep_alive`: it stays, whatever others need."""


@dataclass
class Stay:
    """What the config entries that have used a model say of it; the longest stay counts."""

    seconds: float | None = None
    """After its last use; `None`: until another model needs its room."""
    pinned: bool = False

    def ask(self, keep_alive: float | None) -> None:
        """One more entry uses it: seconds, `PINNED`, or `None`, which leaves it to the others."""
        if keep_alive == PINNED:
            self.pinned = True
        elif keep_alive is not None:
            self.seconds = max(self.seconds or 0.0, keep_alive)

    def ends(self, used: float) -> float:
        """When it leaves by itself that was used last at `used`; `inf`: never."""
        return inf if self.pinned or self.seconds is None else used + self.seconds
