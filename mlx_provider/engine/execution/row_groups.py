"""Groups of decoding rows whose caches are merged as long as that is cheap.

A merged cache is padded to its longest row and copied as a whole when a row joins or leaves. So
only rows of similar length share one, up to a limit in bytes. A row above the limit is a group of
its own, whose cache is never copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...upstream.batch_caches import (
    RowCache,
    counting_alike,
    mergeable,
    merged,
    rows_of,
)
from ...upstream.shared_kv import Prefix, prefix_of
from ..kv_capacity import whole_steps
from ..memory import MemoryProfile, leaves, profile
from ..request import Row

MAX_RATIO = 2.0
"""Longest over shortest row of a group. Padding costs memory and compute."""
SHORT = 256
"""Lengths up to this many tokens count as similar,"""
PADDED = 2048
"""and up to this many where more operations take longer than padding."""
GROWN = 2
"""A group may grow to this multiple of its bound. Each half of it then fits again."""


@dataclass(frozen=True, eq=False)
class Group:
    """Rows of similar length. With one row, `cache` is the cache of that row."""

    rows: list[Row]
    cache: RowCache
    memory: MemoryProfile
    alike: list[list[Any]]
    """Layers with equal token counts."""

    def nbytes(self, *more: Row) -> int:
        """Bytes of its cache if these rows joined, without a shared prefix."""
        lengths = self._own_tokens(*self.rows, *more)
        return len(lengths) * self.memory.row_bytes(max(lengths))

    def resembles(self, row: Row, short: int) -> bool:
        """Whether `row` has a similar length. Lengths up to `short` are."""
        lengths = self._own_tokens(row, *self.rows)
        return max(lengths) <= max(short, MAX_RATIO * min(lengths))

    @property
    def holds_alone(self) -> bool:
        """Whether its only row is the only one with its prefix."""
        prefix = shared_prefix(self.cache)
        return len(self.rows) == 1 and prefix is not None and len(prefix.holders) == 1

    def _own_tokens(self, *rows: Row) -> list[int]:
        prefix = shared_prefix(self.cache)
        shared = 0 if prefix is None else prefix.length
        return [row.held - shared for row in rows]

    def takes_more(self, row: Row) -> bool:
        """Whether one of its rows, or `row`, would have more capacity than alone if `row`
        joined."""
        steps = {whole_steps(own + 1) for own in self._own_tokens(*self.rows, row)}
        return len(steps) > 1

    def caches(self, rows: Sequence[Row]) -> list[RowCache]:
        """Row caches of some of its rows. The cache of the group does not change."""
        if len(self.rows) == 1:
            return [self.cache for _ in rows]
        return rows_of(self.cache, [self.rows.index(row) for row in rows])

    def joined_by(self, row: Row, cache: RowCache) -> Group:
        return group_of([*self.rows, row], [*self.caches(self.rows), cache], self.memory)

    def part(self, rows: list[Row]) -> Group:
        if len(rows) == len(self.rows):
            return self
        return group_of(rows, self.caches(rows), self.memory)

    def share_offsets(self) -> None:
        """Let layers with equal counts share one array of offsets again. In passes of the group
        alone, each layer has counted for itself."""
        for first, *others in self.alike:
            for layer in others:
                layer.offset = first.offset


def group_of(rows: list[Row], caches: Sequence[RowCache], memory: MemoryProfile) -> Group:
    together = merged(caches) if len(caches) > 1 else caches[0]
    return Group(rows, together, memory, counting_alike(leaves(together)))


def shared_prefix(cache: RowCache) -> Prefix | None:
    """The prefix that rows of this cache share with others, in its first layer that has one."""
    found = (prefix_of(layer) for layer in leaves(cache))
    return next((prefix for prefix in found if prefix is not None), None)


@dataclass
class Groups:
    bound: int
    """Largest merged cache in bytes."""
    groups: list[Group] = field(default_factory=list)
    short: int = field(default_factory=lambda: SHORT)
    """Lengths up to so many tokens count as similar."""

    def add(self, row: Row, cache: RowCache, apart: Collection[Row] = ()) -> None:
        """Add a row to the group that fits best, or to a new one. It does not join a row of
        `apart`."""
        groups = self.groups
        may = mergeable(cache) and row not in apart
        open_to = [i for i, g in enumerate(groups) if may and g.rows[0] not in apart]
        prefix = shared_prefix(cache)
        fits = [
            i
            for i in open_to
            if shared_prefix(groups[i].cache) is prefix and self._admits(groups[i], row)
        ]
        if fits:
            at = min(fits, key=lambda i: abs(groups[i].rows[0].held - row.held))
            groups[at] = groups[at].joined_by(row, cache)
        else:
            groups.append(group_of([row], [cache], profile(cache)))

    def drop(self, rows: Sequence[Row]) -> None:
        """Remove rows from their groups, and remove empty groups."""
        gone = set(rows)
        stay = [(g, [row for row in g.rows if row not in gone]) for g in self.groups]
        self.groups = [group.part(left) for group, left in stay if left]

    def merged(self) -> dict[Row, int]:
        """The rows in caches with others, each with `Row.merged`."""
        several = [group.rows for group in self.groups if len(group.rows) > 1]
        longest = [(rows, max(row.held for row in rows)) for rows in several]
        return {row: held + 1 for rows, held in longest for row in rows}

    def shared(self, row: Row) -> bool:
        """Whether a row's cache is merged with others."""
        return any(row in g.rows and len(g.rows) > 1 for g in self.groups)

    def part(self, rows: Sequence[Row]) -> None:
        if rows:
            own = [group_of([row], [self.cache_of(row)], self.of(row).memory) for row in rows]
            self.drop(rows)
            self.groups += own

    def reunite(self, rows: Sequence[Row], apart: Collection[Row]) -> None:
        """Let these rows, each alone in its group, join groups that fit, see `add`."""
        for row in rows:
            cache = self.cache_of(row)
            self.drop([row])
            self.add(row, cache, apart)

    def of(self, row: Row) -> Group:
        return next(g for g in self.groups if row in g.rows)

    def cache_of(self, row: Row) -> RowCache:
        """A cache of that row alone."""
        return self.of(row).caches([row])[0]

    def halve(self) -> None:
        """Split groups above the bound, shorter rows from longer ones."""
        while grown := self.outgrown:
            rows = sorted(grown.rows, key=lambda row: row.held)
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            at = self.groups.index(grown)
            self.groups[at : at + 1] = [grown.part(half) for half in halves]

    @property
    def outgrown(self) -> Group | None:
        limit = GROWN * self.bound
        return next((g for g in self.groups if len(g.rows) > 1 and g.nbytes() > limit), None)

    def _admits(self, group: Group, row: Row) -> bool:
        short = any(each.gave_way for each in (row, *group.rows))  # of memory
        if short and group.takes_more(row):
            return False
        return group.resembles(row, self.short) and group.nbytes(row) <= self.bound
