"""Recent steps and look-ups of an engine, for statistics. Read by any thread, without a lock."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

STEPS = 512
LOOKUPS = 32


class Step(NamedTuple):
    """One step that ran something. Times are monotonic seconds."""

    ended: float
    seconds: float
    rows: int
    tokens: int
    chunk: int
    mixed: bool


class LookedUp(NamedTuple):
    at: float
    request: str
    asked: int
    shared: int
    reused: int
    diverged: bool

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
    """One thread adds; any thread may read."""

    def __init__(self, size: int) -> None:
        self._kept: list[T | None] = [None] * size
        self._added = 0

    def add(self, item: T) -> None:
        self._kept[self._added % len(self._kept)] = item
        self._added += 1

    def items(self) -> list[T]:
        """Sorted by their first field, which is a time."""
        # a slice is one operation that no thread can interrupt
        return sorted(item for item in self._kept[:] if item is not None)


class Recent:
    def __init__(self) -> None:
        self.steps: Ring[Step] = Ring(STEPS)
        self.lookups: Ring[LookedUp] = Ring(LOOKUPS)
        self.drafted = 0
        self.accepted = 0
        self.ahead = 0
        """Prompt tokens that were computed before their request came."""
