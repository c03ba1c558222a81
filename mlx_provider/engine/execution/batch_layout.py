"""The layout of the caches of decoding rows. All share one interface.

- `solo`: every row has its own pass. Always correct.
- `merged`: rows of similar length share upstream's batch caches. Each such group has one pass.
- `grouped`: all groups share one pass, which reads the weights once for any mix of lengths.
- `padded`: `grouped` with groups of rows up to 2,048 tokens, whatever their lengths: each further
  group launches operations in every layer, which takes longer than padding on some GPUs.
- `fixed`: passes of one size, for reproducible models.

A row keeps its own cache until another row joins its group. It gets its own cache back when it is
the last row of the group.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...upstream.batch_caches import RowCache
from ...upstream.shared_kv import prefix_of, unite
from ..memory import leaves
from ..request import Row
from .grouped_kv import GroupedKV, MixedChunk, WideRow, joined, split, with_wide_rows
from .row_groups import PADDED, Group, Groups

log = logging.getLogger(__name__)

LAYOUTS = ("grouped", "merged", "solo")
"""Best first."""
MERGED_BYTES = 1 << 29
"""Largest group that a row may join, in bytes. The copy takes a few milliseconds."""
PASS_BYTES = 1 << 32
"""The same limit for layouts with one pass per group. One more pass reads the weights again in
every step, which costs more than an occasional copy."""

REUNITED = 32
"""Passes without drafts after which a row may share a group again. More kernels in each pass cost
more than an occasional copy."""

Widths = Mapping[Row, int]
NO_DRAFTS: Widths = MappingProxyType({})


@dataclass(frozen=True)
class Pass:
    rows: list[Row]
    """One token each."""
    cache: RowCache
    drafting: Sequence[Row] = ()
    """Rows with drafts. Their tokens come after those of `rows`: each row's own token, then its
    drafts."""
    chunk: MixedChunk | None = None
    """Its tokens come last."""
    fillers: int = 0
    """Padding rows after the others. Nothing reads their results."""


class Layout(ABC):
    name: str
    one_pass = False
    """Whether all rows share one pass, which may have drafts and a chunk."""

    @abstractmethod
    def add(self, row: Row, cache: RowCache) -> None:
        """The layout owns the cache from now on."""

    @abstractmethod
    def drop(self, rows: Sequence[Row]) -> None:
        """Remove rows and free their caches."""

    @abstractmethod
    def passes(self, chunk: MixedChunk | None = None, widths: Widths = NO_DRAFTS) -> list[Pass]:
        """The passes for one token of every row. Only `grouped` includes the chunk. `widths`: token
        counts of the rows with drafts, only for `grouped`. Call `keep` for these rows before any
        other use."""

    @abstractmethod
    def cache_of(self, row: Row) -> RowCache | None:
        """The row's own cache. `None`: it is merged with those of others."""

    @abstractmethod
    def extract(self, row: Row) -> RowCache:
        """A cache of that row alone, made of views. Reading some tokens copies only those. The
        arrays of the layout do not change."""

    def merged(self) -> Mapping[Row, int]:
        """The rows in caches with others, each with `Row.merged`."""
        return {}

    def keep(self, row: Row, tokens: int) -> None:  # noqa: B027
        """Keep the first `tokens` tokens of the last pass in the row's cache, at least one. If
        called again before any other use of the row, the last call counts."""


def make_layout(name: str) -> Layout:
    if name == "solo":
        return SoloLayout()
    return MergedLayout() if name == "merged" else GroupedLayout(padded=name == "padded")


class SoloLayout(Layout):
    name = "solo"

    def __init__(self) -> None:
        self._caches: dict[Row, RowCache] = {}

    def add(self, row: Row, cache: RowCache) -> None:
        self._caches[row] = cache

    def drop(self, rows: Sequence[Row]) -> None:
        for row in rows:
            del self._caches[row]

    def passes(self, chunk: MixedChunk | None = None, widths: Widths = NO_DRAFTS) -> list[Pass]:
        return [Pass([row], cache) for row, cache in self._caches.items()]

    def cache_of(self, row: Row) -> RowCache | None:
        return self._caches[row]

    def extract(self, row: Row) -> RowCache:
        return self._caches[row]


class GroupLayout(Layout):
    rows: Groups

    def cache_of(self, row: Row) -> RowCache | None:
        return None if self.rows.shared(row) else self.rows.cache_of(row)

    def merged(self) -> Mapping[Row, int]:
        return self.rows.merged()


class MergedLayout(GroupLayout):
    name = "merged"

    def __init__(self) -> None:
        self.rows = Groups(PASS_BYTES)

    def add(self, row: Row, cache: RowCache) -> None:
        self.rows.add(row, cache)

    def drop(self, rows: Sequence[Row]) -> None:
        self.rows.drop(rows)

    def passes(self, chunk: MixedChunk | None = None, widths: Widths = NO_DRAFTS) -> list[Pass]:
        self.rows.halve()
        return [Pass(group.rows, group.cache) for group in self.rows.groups]

    def extract(self, row: Row) -> RowCache:
        return self.rows.cache_of(row)


class GroupedLayout(GroupLayout):
    one_pass = True

    def __init__(self, *, padded: bool = False) -> None:
        self.name = "padded" if padded else "grouped"
        self.rows = Groups(PASS_BYTES, short=PADDED) if padded else Groups(MERGED_BYTES)
        self._joined: RowCache | None = None
        """The joint cache of several groups. `None`: it must be rebuilt."""
        self._members: list[Group] = []
        """The groups in the joint cache."""
        self._unverified: dict[Row, WideRow] = {}
        """Rows that had several tokens in the last pass."""
        self._since: dict[Row, int] = {}
        """Passes since the last drafts of rows that have a group of their own."""
        self._passes = 0
        self._lone: set[Row] = set()
        """Rows that were the only ones with their prefix at the last look."""

    def add(self, row: Row, cache: RowCache) -> None:
        self._split()
        self.rows.add(row, cache, apart=self._unverified)  # whose length is not known yet

    def drop(self, rows: Sequence[Row]) -> None:
        self._split()
        self.rows.drop(rows)
        for row in rows:
            self._unverified.pop(row, None)
            self._since.pop(row, None)
            self._lone.discard(row)

    def passes(self, chunk: MixedChunk | None = None, widths: Widths = NO_DRAFTS) -> list[Pass]:
        self._settle()
        self._unite()
        self._reunite(widths)
        self._part(widths)
        if not self.rows.groups:
            return []
        groups = [g for g in self.rows.groups if g.rows[0] not in widths]
        together = self._together(groups)
        rows = [row for group in groups for row in group.rows]
        drafting = {
            row: WideRow(self.rows.cache_of(row), tokens, drafts=True)
            for row, tokens in widths.items()
        }
        self._unverified |= drafting
        wide = [*drafting.values(), *([] if chunk is None else [chunk.wide])]
        if not wide and together is not None:
            return [Pass(rows, together)]
        cache = with_wide_rows(together, _caches(groups), _sizes(groups), wide)
        return [Pass(rows, cache, tuple(widths), chunk)]

    def keep(self, row: Row, tokens: int) -> None:
        if row in self._unverified:
            self._unverified[row].kept = tokens

    def extract(self, row: Row) -> RowCache:
        self._settle()
        self._split()
        return self.rows.cache_of(row)

    def _settle(self) -> None:
        for row in [row for row, wide in self._unverified.items() if wide.kept is not None]:
            self._unverified.pop(row).settle()

    def _unite(self) -> None:
        """Let rows that hold a prefix alone for long become one buffer again."""
        self._passes += 1
        if self._passes % REUNITED:
            return
        lone = {group.rows[0]: group.cache for group in self.rows.groups if group.holds_alone}
        with Isolation() as tried:  # an earlier pass may fail here, which its tokens tell again
            for row in lone.keys() & self._lone:
                for layer in leaves(lone[row]):
                    if prefix_of(layer) is not None:
                        unite(layer)
        if tried.fault is not None:
            log.warning("a row keeps its prefix apart: %s", tried.fault.summary)
        self._lone = lone.keys() - self._lone

    def _reunite(self, widths: Widths) -> None:
        """Let rows without recent drafts join the groups of other rows again."""
        waited = {row: passes + 1 for row, passes in self._since.items()}
        self._since = {**waited, **dict.fromkeys(widths, 0)}
        due = [row for row, passes in self._since.items() if passes >= REUNITED]
        for row in due:
            del self._since[row]
        if due and len(self.rows.groups) > 1:
            self._split()
            self.rows.reunite([row for row in due if not self.rows.shared(row)], self._since)

    def _part(self, widths: Widths) -> None:
        shared = [row for row in widths if self.rows.shared(row)]
        if self.rows.outgrown or shared:
            self._split()
            self.rows.halve()
            self.rows.part(shared)

    def _together(self, groups: list[Group]) -> RowCache | None:
        """The joint cache of these groups. `None`: there are no groups."""
        if self._members != groups:
            self._split()
        if len(groups) < 2:
            return groups[0].cache if groups else None
        if self._joined is None:
            self._joined, self._members = joined(_caches(groups), _sizes(groups)), groups
        return self._joined

    def _split(self) -> None:
        """Give every group its recurrent state back before the groups change."""
        if self._joined is not None:
            split(self._joined, [g.cache for g in self._members], _sizes(self._members))
        self._joined, self._members = None, []


def _caches(groups: Sequence[Group]) -> list[RowCache]:
    for group in groups:
        group.share_offsets()
    return [group.cache for group in groups]


def _sizes(groups: Sequence[Group]) -> list[int]:
    return [len(group.rows) for group in groups]


class FillerKV:
    """Attention cache of one layer for filler rows. Each row sees only its own token. The cache
    stores nothing, so it never grows."""

    offset = 0

    def make_mask(self, *args: Any, **kwargs: Any) -> None: ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def fillers(layer: Any) -> Any:
    """Cache of one layer for the filler rows of a pass beside a row that has `layer`."""
    if hasattr(layer, "caches"):
        together = type(layer)()
        together.caches = tuple(fillers(each) for each in layer.caches)
        return together
    # a missing recurrent state begins with zeros and keeps its size
    return FillerKV() if hasattr(layer, "update_and_fetch") else type(layer)(len(layer.cache))


class Tile:
    def __init__(self, rows: list[Row], caches: Sequence[RowCache], size: int) -> None:
        self.rows = rows
        self.missing = size - len(rows)
        self._caches = list(caches)
        self._sizes = [1] * len(rows)
        if self.missing:
            self._caches.append([fillers(layer) for layer in caches[0]])
            self._sizes.append(self.missing)
        self._together = joined(self._caches, self._sizes) if size > 1 else None
        for layer in leaves(self._together or []):
            if isinstance(layer, GroupedKV):
                layer.apart = True

    @property
    def each(self) -> Pass:
        return Pass(self.rows, self._together or self._caches[0], fillers=self.missing)

    def part(self) -> None:
        if self._together is not None:
            split(self._together, self._caches, self._sizes)


class FixedLayout(Layout):
    """Passes of one size, for reproducible models. A row whose step failed has its own pass. Each
    row is its own group and attends only to its own keys, in arrays that it shares with no other
    row. All other computation runs for `size` rows at once; filler rows replace missing ones. The
    place of a row and the other rows do not change its result (`probe.exact_rows` checks it)."""

    name = "fixed"

    def __init__(self, size: int) -> None:
        self._size = size
        self._caches: dict[Row, RowCache] = {}
        self._tiles: list[Tile] = []

    def add(self, row: Row, cache: RowCache) -> None:
        self._caches[row] = cache

    def drop(self, rows: Sequence[Row]) -> None:
        self._part(rows)
        for row in rows:
            del self._caches[row]

    def passes(self, chunk: MixedChunk | None = None, widths: Widths = NO_DRAFTS) -> list[Pass]:
        wanted = self._arranged()
        if wanted != [tile.rows for tile in self._tiles]:
            self._part(
                [row for tile in self._tiles if tile.rows not in wanted for row in tile.rows]
            )
            known = {tile.rows[0]: tile for tile in self._tiles}
            self._tiles = [
                known.get(rows[0]) or Tile(rows, [self._caches[row] for row in rows], self._size)
                for rows in wanted
            ]
        return [tile.each for tile in self._tiles]

    def cache_of(self, row: Row) -> RowCache | None:
        return None

    def extract(self, row: Row) -> RowCache:
        self._part([row])
        return self._caches[row]

    def _arranged(self) -> list[list[Row]]:
        apart = [[row] for row in self._caches if row.retry_alone]
        others = [row for row in self._caches if not row.retry_alone]
        starts = range(0, len(others), self._size)
        return [*apart, *(others[at : at + self._size] for at in starts)]

    def _part(self, rows: Sequence[Row]) -> None:
        touched = set(rows)
        for tile in [tile for tile in self._tiles if touched & {*tile.rows}]:
            tile.part()
            self._tiles.remove(tile)
