"""Recent steps and look-ups of an engine for statistics. Written per step, read by any thread,
without a lock."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

STEPS = 512
"""Number of steps that are kept."""
LOOKUPS = 32
"""Number of prefix cache look-ups that are kept."""


class Step(NamedTuple):
    """One step that ran something. Times are monotonic seconds."""

    ended: float
    seconds: float
    rows: int
    tokens: int
    chunk: int
    mixed: bool


class LookedUp(NamedTuple):
    """Result of a prefix cache look-up."""

    at: float
    request: str
    asked: int
    """Tokens of the prompt."""
    shared: int
    """Stored tokens of the prompt."""
    reused: int
    """Tokens that were reused."""
    diverged: bool
    """Whether the stored tokens continue differently."""

    @property
    def lost(self) -> dict[str, int]:
        """The prompt's tokens by the reason why they were computed or reused."""
        rest = "cold" if not self.shared else "diverged" if self.diverged else "new"
        return {
            "hit": self.reused,
            "no_state": self.shared - self.reused,
            rest: self.asked - self.shared,
        }


T = TypeVar("T", bound=NamedTuple)


class Ring(Generic[T]):
    """A ring buffer of the last items. One thread adds; any thread may read."""

    def __init__(self, size: int) -> None:
        self._kept: list[T | None] = [None] * size
        self._added = 0

    def add(self, item: T) -> None:
        """Add an item; the oldest one is dropped."""
        self._kept[self._added % len(self._kept)] = item
        self._added += 1

    def items(self) -> list[T]:
        """The items, sorted by their first field, which is a time."""
        # a slice is one operation that no thread can interrupt
        return sorted(item for item in self._kept[:] if item is not None)


class Recent:
    """The recent history of one engine."""

    def __init__(self) -> None:
        self.steps: Ring[Step] = Ring(STEPS)
        self.lookups: Ring[LookedUp] = Ring(LOOKUPS)
        self.drafted = 0
        """Drafted tokens."""
        self.accepted = 0
        """Accepted draft tokens."""
        self.ahead = 0
        """Prompt tokens that were computed before their request came."""
