"""What rank 0 counts while it serves, in a file that the benchmark reads at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

COUNTED = (
    "model_calls",
    "model_bytes",
    "other_calls",
    "other_bytes",
    "messages",
    "message_bytes",
    "tell_seconds",
    "passes",
)
"""Collectives of the model and others with their bytes, messages to followers, passes."""
PASS = 3
"""Numbers of a pass: when it was built, rows, tokens of each."""
ROOM = 2**16
"""Passes."""


@dataclass(frozen=True)
class Seen:
    """What was counted up to one moment."""

    counts: dict[str, float]

    def since(self, before: Seen) -> dict[str, float]:
        return {name: self.counts[name] - before.counts[name] for name in COUNTED}


class Tally:
    """One process writes, another reads; numbers are whole at any time, not all of one moment."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        mode: Literal["w+", "r+"] = "w+" if create else "r+"
        numbers = len(COUNTED) + PASS * ROOM
        self._numbers = np.memmap(path, np.float64, mode, shape=(numbers,))
        self._places = {name: at for at, name in enumerate(COUNTED)}

    def add(self, name: str, value: float = 1) -> None:
        self._numbers[self._places[name]] += value

    def passed(self, when: float, rows: int, tokens: int) -> None:
        """A pass through the model was built; those beyond `ROOM` replace the first."""
        number = int(self._numbers[self._places["passes"]])
        at = len(COUNTED) + PASS * (number % ROOM)
        self._numbers[at : at + PASS] = (when, rows, tokens)
        self.add("passes")

    def seen(self) -> Seen:
        return Seen({name: float(self._numbers[at]) for name, at in self._places.items()})

    def passes(self, before: Seen, after: Seen) -> list[tuple[float, int, int]]:
        """Of the time between, in order."""
        numbers = range(int(before.counts["passes"]), int(after.counts["passes"]))
        places = [len(COUNTED) + PASS * (number % ROOM) for number in numbers]
        found = [self._numbers[at : at + PASS].tolist() for at in places]
        return [(when, int(rows), int(tokens)) for when, rows, tokens in found]


def step_seconds(passes: Sequence[tuple[float, int, int]], rows: int) -> float | None:
    """Median time from one decode pass of so many rows to the next; nothing: there were none."""
    taken = [
        later[0] - one[0] for one, later in pairwise(passes) if one[1:] == later[1:] == (rows, 1)
    ]
    return median(taken) if taken else None
