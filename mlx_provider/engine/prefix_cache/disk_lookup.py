"""Finds the part of a prompt that only the disk has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from .disk import DiskTier, Stored
from .files import BadFile
from .match import resume
from .restore import Part, Plan, Restore, RowFiller, leaves_of
from .segments import Segment
from .store import Store
from .tree import CacheKey, Ids, Walk, outside_spans


class DiskLookup:
    """Engine thread only."""

    def __init__(
        self,
        disk: DiskTier,
        store: Store,
        key: CacheKey,
        ids: Ids,
        *,
        limit: int,
        grid: int,
        make_cache: Callable[[], list[Any]],
        room: int,
    ) -> None:
        """`limit`: most tokens to restore, a multiple of `grid`. `room`: tokens of the row."""
        self._disk = disk
        self._store = store
        self._key = key
        self._ids = ids
        self._limit = limit
        self._grid = grid
        self._make_cache = make_cache
        self._room = room
        self._have = 0

    @property
    def length(self) -> int:
        """Tokens that a restore gives now. 0: memory has as many."""
        return self._find()[1].length

    def start(self) -> Restore:
        restore = Restore(self)
        self._disk.read(restore)
        return restore

    def plan(self) -> Plan | None:
        found, stored = self._find()
        if not stored.length:
            return None
        self._disk.touch(self._key, self._ids[: stored.length])
        states = frozenset() if stored.state is None else frozenset(leaves_of(stored.state))
        filler = RowFiller(self._make_cache(), stored.length, self._room - stored.length, states)
        held = _held(found, stored.length)
        return Plan(filler, held, stored.segments, stored.state, stored.length)

    def usable(self, length: int) -> int:
        at = outside_spans(self._ids, length)
        while at % self._grid:
            at = outside_spans(self._ids, at - at % self._grid)
        return at if at > self._have else 0

    def damaged(self, name: str, reason: BadFile | OSError) -> None:
        self._disk.damaged(name, reason)

    def _find(self) -> tuple[Walk, Stored]:
        ids = self._ids[: self._limit]
        found = self._store.walk(self._key, ids)
        self._have = resume(found, self._ids, 0).length // self._grid * self._grid
        complete = all(node.complete for node, _ in found.steps)
        stored = self._disk.find(
            self._key, ids, found.shared, complete=complete, usable=self.usable
        )
        return found, stored


def _held(found: Walk, length: int) -> list[Part]:
    parts: list[Part] = []
    for node, agreed in found.steps:
        stop = min(node.start + agreed, length)
        if node.start < stop:
            segment = cast("Segment", node.segment)
            parts.append((segment.arrays(), node.start, stop, 0))
    return parts
