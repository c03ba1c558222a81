"""Restores a prefix from disk into the row cache of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .disk_index import Step
from .encoding import Staged
from .files import BadFile, Contents, Header, HostArray
from .row_filler import RowFiller
from .snapshots import Snapshot

SLICE = 2**26
"""Bytes copied into a row between two steps."""

Part = tuple[Mapping[int, Sequence[Any]], int, int, int]
"""Arrays by leaf, their tokens `start .. stop`, and the tokens before these in the arrays."""


@dataclass(frozen=True)
class Plan:
    filler: RowFiller
    held: Sequence[Part]
    segments: Sequence[Step]
    state: Header | None
    length: int


class Origin(Protocol):
    def plan(self) -> Plan | None:
        """The files to read now. `None`: memory has the tokens."""

    def usable(self, length: int) -> int:
        """The largest length within `length` at which the row may resume. 0: memory has as many
        tokens."""

    def damaged(self, name: str, reason: BadFile | OSError) -> None:
        """A file cannot be read."""


class Restore:
    """Engine thread only: the reader's thread calls it there."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._plan: Plan | None = None
        self._at = 0
        self._staged: Staged | None = None
        self._left: list[Sequence[tuple[int, int, int]]] = []
        self._state: Snapshot | None = None
        self._reached = 0
        self.ended = False
        """Any thread may read this."""
        self.cache: list[Any] | None = None
        """The row cache once the restore has ended. `None`: nothing was restored."""
        self.length = 0

    def begin(self) -> Sequence[Header]:
        plan = None if self.ended else self._origin.plan()
        if plan is None:
            self.abandon()
            return []
        self._plan = plan
        for arrays, start, stop, skip in plan.held:
            plan.filler.put(arrays, start, stop, skip)
            self._reached = stop
        return self._headers(plan)

    def stage(self, contents: Contents) -> Sequence[HostArray]:
        if self.ended:
            raise FileNotFoundError("the request has ended")
        self._staged = Staged.of(contents)
        return self._staged.views()

    def take(self) -> bool:
        plan, staged = self._plan, self._staged
        if self.ended or plan is None or staged is None:
            return False
        header = self._headers(plan)[self._at]
        if header is plan.state:
            self._state = Snapshot(dict(header.structure["layers"]), staged.pack())
        else:
            if not self._left:
                self._left = _slices(header, staged, plan.filler.leaves)
            self._put(plan, staged)
            if self._left:
                return True
        self._staged = None
        self._at += 1
        return False

    def _put(self, plan: Plan, staged: Staged) -> None:
        _, first, took = plan.segments[self._at - (plan.state is not None)]
        start, stop = max(first, self._reached), min(first + took, plan.length)
        leaves = self._left.pop(0) if self._left else []
        arrays = {leaf: [staged[i] for i in range(at, at + n)] for leaf, at, n in leaves}
        plan.filler.put(arrays, start, stop, start - first)
        if not self._left:
            self._reached = stop

    def stop(self, name: str, reason: BadFile | OSError) -> None:
        if self.ended:
            return
        self._origin.damaged(name, reason)
        plan = self._plan
        length = 0 if plan is None or plan.state is not None else self._reached
        self._end(self._origin.usable(length))

    def finish(self) -> None:
        if not self.ended and self._plan is not None:
            self._end(self._plan.length)

    def abandon(self) -> None:
        """The request ended or the restore failed. Frees its memory at once."""
        self._end(0)

    def _end(self, length: int) -> None:
        if self.ended:
            return
        if length and self._plan is not None:
            self.cache = self._plan.filler.finish(length, self._state)
            self.length = length
        self._plan = self._staged = self._state = None
        self._left = []
        self.ended = True

    def _headers(self, plan: Plan) -> Sequence[Header]:
        """The state first, because nothing is usable without it."""
        state = [] if plan.state is None else [plan.state]
        return [*state, *(header for header, _, _ in plan.segments)]


def leaves_of(state: Header) -> list[int]:
    return [leaf for leaf, _ in state.structure["layers"]]


def _slices(
    header: Header, staged: Staged, wanted: frozenset[int]
) -> list[Sequence[tuple[int, int, int]]]:
    """The leaves of a segment, each with its first array and its number of arrays, in slices."""
    found, at = [], 0
    for leaf, count in header.structure["layers"]:
        if leaf in wanted and count:
            found.append((leaf, at, count))
        at += count
    each = max(1, sum(array.nbytes for array in staged.arrays) // max(1, len(found)))
    size = max(1, SLICE // each)
    return [found[at : at + size] for at in range(0, len(found), size)]
