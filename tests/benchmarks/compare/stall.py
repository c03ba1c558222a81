"""The longest gap of streams while a long prompt arrives, and the time to its first token.

Both are needed: a server that delays the prompt has no gaps, and one that computes it in one pass
answers it first.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from mlx_provider_bench.model_speed import document
from peers import both, questions
from servers import Answer, Messages

from .plan import Plan, Subject
from .rows import Row, Rows
from .sides import Side, in_turn

STREAMS = 2
LONGER = 6
"""Times the usual answer's tokens of the streams: they should outlast the prompt."""
NEWCOMER = 2
"""Tokens of the answer to the long prompt."""
TOO_SHORT = "ended before the prompt was answered"
"""What would have been seen of them later is not known: longer answers are needed."""
PIECES = 2
"""Of each stream before the prompt comes."""


T = TypeVar("T")


class Begun:
    """Counts the pieces of text of several streams. Safe from several threads.

    It does not know the stream of a piece: it waits for `pieces` times the number of streams.
    """

    def __init__(self, streams: int, pieces: int = 2) -> None:
        self._left = streams * pieces
        self._lock = threading.Lock()
        self._enough = threading.Event()
        self.end = 0.0
        """When all of them had ended; 0: not yet."""

    def heard(self) -> bool:
        """Count one piece of a stream."""
        with self._lock:
            self._left -= 1
            if self._left <= 0:
                self._enough.set()
        return True

    def ended(self, result: T) -> T:
        """All streams have ended, with or without text: end the wait."""
        self.end = time.perf_counter()
        self._enough.set()
        return result

    def wait(self, limit: float) -> float:
        """Wait until they have begun, or the time is up. Returns that time."""
        self._enough.wait(limit)
        return time.perf_counter()


def measure(plan: Plan, subject: Subject, sides: Sequence[Side]) -> Iterator[list[Row]]:
    rows = Rows("stall", subject)
    for turn in range(plan.rounds):
        asked = questions("stall", STREAMS, turn, plan.words)
        text = document(f"stall {turn}", plan.prompt)
        late: Messages = [{"role": "user", "content": f"{text}\nWhich colour is it?"}]
        for side in in_turn(sides, turn):
            row = rows(f"{STREAMS} streams, a prompt of {plan.prompt} words", side.name)
            add_row(row, _scene(side, plan, asked, late))
    yield rows.all()


@dataclass(frozen=True)
class Scene:
    """The observations. Times of one clock, in seconds from the start of the streams."""

    streams: Sequence[Answer]
    newcomer: Answer
    came: float


def _scene(side: Side, plan: Plan, asked: Sequence[Messages], late: Messages) -> Scene:
    begun = Begun(len(asked), PIECES)
    start = time.perf_counter()

    def stream() -> list[Answer]:
        return begun.ended(side.together(asked, LONGER * plan.reply, heard=begun.heard))

    def arrive() -> tuple[float, Answer]:
        came = begun.wait(plan.limit) - start
        return came, side.alone([late], NEWCOMER)[0]

    streams, (came, newcomer) = both(stream, arrive)
    return Scene(streams, newcomer, came)


def add_row(row: Row, scene: Scene) -> None:
    row.count([*scene.streams, scene.newcomer])
    whole = not scene.newcomer.failure and not any(each.failure for each in scene.streams)
    gaps = [gap for each in scene.streams for gap in gaps_after(each.times, scene.came)]
    row.add("longest_gap", max(gaps) if whole and gaps else None)
    row.add("newcomer", scene.newcomer.first if whole else None)
    ends = max((each.total for each in scene.streams), default=0.0)
    if whole and ends < scene.came + scene.newcomer.first:
        row.notes["streams"] = TOO_SHORT


def gaps_after(times: Sequence[float], since: float) -> list[float]:
    """Gaps of a stream that end after `since`."""
    return [later - earlier for earlier, later in pairwise(times) if later > since]
