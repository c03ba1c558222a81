"""What an engine did last, for whoever looks: written per step, read by any thread, no lock."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

STEPS = 512
"""Steps that are remembered."""
LOOKUPS = 32
"""Lookups in the prefix cache that are remembered."""


class Step(NamedTuple):
    """One step that ran something. Times are monotonic seconds."""

    ended: float
    seconds: float
    rows: int
    tokens: int
    chunk: int
    mixed: bool


class LookedUp(NamedTuple):
    """What the prefix cache had of a prompt."""

    at: float
    request: str
    asked: int
    """Tokens of the prompt,"""
    shared: int
    """those that are stored of it,"""
    reused: int
    """and those that were taken."""
    diverged: bool
    """What is stored goes on in another way."""

    @property
    def lost(self) -> dict[str, int]:
        """The prompt's tokens by why they were computed, or not."""
        rest = "cold" if not self.shared else "diverged" if self.diverged else "new"
        return {
            "hit": self.reused,
            "no_state": self.shared - self.reused,
            rest: self.asked - self.shared,
        }


T = TypeVar("T", bound=NamedTuple)


class Ring(Generic[T]):
    """The last items; one thread adds, any may read."""

    def __init__(self, size: int) -> None:
        self._kept: list[T | None] = [None] * size
        self._added = 0

    def add(self, item: T) -> None:
        """The oldest one goes."""
        self._kept[self._added % len(self._kept)] = item
        self._added += 1

    def items(self) -> list[T]:
        """Those that are there, in the order of their first field, which is when they were."""
        # a slice is one operation, over which no thread gets a turn
        return sorted(item for item in self._kept[:] if item is not None)


class Recent:
    """Of one engine."""

    def __init__(self) -> None:
        self.steps: Ring[Step] = Ring(STEPS)
        self.lookups: Ring[LookedUp] = Ring(LOOKUPS)
        self.drafted = 0
        """Tokens that were guessed ahead,"""
        self.accepted = 0
        """and those of them that held."""
