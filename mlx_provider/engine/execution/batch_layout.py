"""How the caches of decoding rows lie together. Three layouts behind one interface.

- `solo`: every row decodes by itself. Always right.
- `merged`: rows of similar length share upstream's batch caches; one pass per such group.
- `grouped`: groups in one pass, which reads the weights once for any mix of lengths.

A row's cache is its own until another row joins its group, and again once it is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...upstream.batch_caches import RowCache
from ..request import Row
from .grouped_kv import beside, joined, split
from .piggyback import PiggybackedChunk
from .row_groups import Groups

LAYOUTS = ("grouped", "merged", "solo")
"""Best first."""
MERGED_BYTES = 1 << 29
"""Of a group that a row may join: the copy is a few milliseconds of what memory can move."""
PASS_BYTES = 1 << 32
"""The same where groups have passes of their own: one more reads the weights again in every
step, which is more than now and then a copy."""


@dataclass(frozen=True)
class Pass:
    """Rows that one forward pass decodes, and the cache to call the model with."""

    rows: list[Row]
    cache: RowCache
    chunk: PiggybackedChunk | None = None
    """Its tokens come after the rows."""


class Layout(Protocol):
    name: str

    def add(self, row: Row, cache: RowCache) -> None:
        """Let a row join; its cache belongs to the layout from now on."""

    def drop(self, rows: Sequence[Row]) -> None:
        """Let rows leave; their caches are freed."""

    def passes(self, chunk: PiggybackedChunk | None = None) -> list[Pass]:
        """What to run for one token of every row; a chunk is taken along if `grouped`."""

    def extract(self, row: Row) -> RowCache:
        """A cache of that row alone, of views: reading some tokens copies those alone.

        The layout's arrays are not changed by it.
        """


def make_layout(name: str) -> Layout:
    """A new, empty layout."""
    if name == "solo":
        return SoloLayout()
    return MergedLayout() if name == "merged" else GroupedLayout()


class SoloLayout:
    """One pass per row."""

    name = "solo"

    def __init__(self) -> None:
        self._caches: dict[Row, RowCache] = {}

    def add(self, row: Row, cache: RowCache) -> None:
        self._caches[row] = cache

    def drop(self, rows: Sequence[Row]) -> None:
        for row in rows:
            del self._caches[row]

    def passes(self, chunk: PiggybackedChunk | None = None) -> list[Pass]:
        return [Pass([row], cache) for row, cache in self._caches.items()]

    def extract(self, row: Row) -> RowCache:
        return self._caches[row]


class MergedLayout:
    """One pass per group."""

    name = "merged"

    def __init__(self) -> None:
        self.rows = Groups(PASS_BYTES)

    def add(self, row: Row, cache: RowCache) -> None:
        self.rows.add(row, cache)

    def drop(self, rows: Sequence[Row]) -> None:
        self.rows.drop(rows)

    def passes(self, chunk: PiggybackedChunk | None = None) -> list[Pass]:
        self.rows.halve()
        return [Pass(group.rows, group.cache) for group in self.rows.groups]

    def extract(self, row: Row) -> RowCache:
        return self.rows.cache_of(row)


class GroupedLayout:
    """One pass over all groups."""

    name = "grouped"

    def __init__(self) -> None:
        self.rows = Groups(MERGED_BYTES)
        self._joined: RowCache | None = None
        """The cache of all groups together while there are several; `None`: build it anew."""

    def add(self, row: Row, cache: RowCache) -> None:
        self._split()
        self.rows.add(row, cache)

    def drop(self, rows: Sequence[Row]) -> None:
        self._split()
        self.rows.drop(rows)

    def passes(self, chunk: PiggybackedChunk | None = None) -> list[Pass]:
        if self.rows.outgrown:
            self._split()
            self.rows.halve()
        if not self.rows.groups:
            return []
        together = self._together()
        if chunk is None:
            return [Pass(self._all_rows(), together)]
        sizes = self._sizes()
        cache = beside(together, self._caches(), sizes, chunk.cache, len(chunk.tokens))
        return [Pass(self._all_rows(), cache, chunk)]

    def _together(self) -> RowCache:
        """The cache of all groups."""
        groups = self.rows.groups
        if len(groups) == 1:
            return groups[0].cache
        if self._joined is None:
            self._joined = joined(self._caches(), self._sizes())
        return self._joined

    def extract(self, row: Row) -> RowCache:
        self._split()
        return self.rows.cache_of(row)

    def _split(self) -> None:
        """Give every group its recurrent state back before groups change."""
        if self._joined is not None:
            split(self._joined, [g.cache for g in self.rows.groups], self._sizes())
        self._joined = None

    def _caches(self) -> list[RowCache]:
        """Of the groups, for a pass over all of them."""
        for group in self.rows.groups:
            group.share_offsets()
        return [group.cache for group in self.rows.groups]

    def _sizes(self) -> list[int]:
        return [len(group.rows) for group in self.rows.groups]

    def _all_rows(self) -> list[Row]:
        return [row for group in self.rows.groups for row in group.rows]
