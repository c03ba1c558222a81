"""The layout of the caches of decoding rows. Three layouts share one interface.

- `solo`: every row has its own pass. Always correct.
- `merged`: rows of similar length share upstream's batch caches. Each such group has one pass.
- `grouped`: all groups share one pass, which reads the weights once for any mix of lengths.

`padded` is `grouped` with groups of rows up to 2,048 tokens, whatever their lengths: each further
group launches operations in every layer, which takes longer than padding on some GPUs. A layout for
reproducible models is in `fixed_rows`.

A row keeps its own cache until another row joins its group. It gets its own cache back when it is
the last row of the group.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from ...isolation import Isolation
from ...records import Unread
from ...upstream.batch_caches import RowCache
from ...upstream.shared_kv import prefix_of, unite
from ..memory import leaves
from ..request import Row
from .grouped_kv import joined, split, with_wide_rows
from .mixed_chunk import MixedChunk, Turned, Unsettled, may_be_stale
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
Results = Mapping[Row, Unread]
"""Results of the last pass that are not read yet, of rows that take part in the next one."""
NO_RESULTS: Results = MappingProxyType({})


@dataclass(frozen=True)
class Pass:
    """Rows that one forward pass decodes, and the cache to call the model with."""

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


class Layout(Protocol):
    name: str

    def add(self, row: Row, cache: RowCache) -> None:
        """Add a row. The layout owns its cache from now on."""

    def drop(self, rows: Sequence[Row]) -> None:
        """Remove rows and free their caches."""

    def passes(
        self,
        chunk: MixedChunk | None = None,
        widths: Widths = NO_DRAFTS,
        unread: Results = NO_RESULTS,
    ) -> list[Pass]:
        """The passes for one token of every row. Only `grouped` includes the chunk.

        `widths`: token counts of the rows with drafts, only for `grouped`. Call `keep` for these
        rows before any other use. `unread`: for rows of `widths` that `may_look_ahead`, in place of
        that call. Then call `keep` for the pass before, and `follow`.
        """

    def cache_of(self, row: Row) -> RowCache | None:
        """The row's own cache. `None`: it is merged with those of others."""

    def merged(self) -> Mapping[Row, int]:
        """The rows in caches with others, each with `Row.merged`."""

    def keep(self, row: Row, tokens: int) -> None:
        """Keep the first `tokens` tokens of the last pass in the row's cache, at least one. If
        called again before any other use of the row, the last call counts."""

    def may_look_ahead(self, row: Row) -> bool:
        """Whether the row's next pass may be launched before the result of the last one is read."""

    def follow(self, row: Row) -> None:
        """The result that the row's last pass followed unread is now read, and `keep` was called
        for it: shorten the row's cache by the drafts that did not hold. Raises `RuntimeError`
        otherwise."""

    def extract(self, row: Row) -> RowCache:
        """A cache of that row alone, made of views. Reading some tokens copies only those. A pass
        that followed an unread result is taken back, if `follow` was not called for it.

        The arrays of the layout do not change.
        """


def make_layout(name: str) -> Layout:
    """A new, empty layout."""
    if name == "solo":
        return SoloLayout()
    return MergedLayout() if name == "merged" else GroupedLayout(padded=name == "padded")


class OneTokenLayout:
    """A layout whose passes have one token per row: it keeps each, and follows no unread result."""

    def merged(self) -> Mapping[Row, int]:
        return {}

    def keep(self, row: Row, tokens: int) -> None:
        """Nothing to remove."""

    def may_look_ahead(self, row: Row) -> bool:
        return False

    def follow(self, row: Row) -> None:
        """Nothing was followed."""


class SoloLayout(OneTokenLayout):
    """One pass per row."""

    name = "solo"

    def __init__(self) -> None:
        self._caches: dict[Row, RowCache] = {}

    def add(self, row: Row, cache: RowCache) -> None:
        self._caches[row] = cache

    def drop(self, rows: Sequence[Row]) -> None:
        for row in rows:
            del self._caches[row]

    def passes(
        self,
        chunk: MixedChunk | None = None,
        widths: Widths = NO_DRAFTS,
        unread: Results = NO_RESULTS,
    ) -> list[Pass]:
        return [Pass([row], cache) for row, cache in self._caches.items()]

    def cache_of(self, row: Row) -> RowCache | None:
        return self._caches[row]

    def extract(self, row: Row) -> RowCache:
        return self._caches[row]


class MergedLayout(OneTokenLayout):
    """One pass per group."""

    name = "merged"

    def __init__(self) -> None:
        self.rows = Groups(PASS_BYTES)

    def add(self, row: Row, cache: RowCache) -> None:
        self.rows.add(row, cache)

    def drop(self, rows: Sequence[Row]) -> None:
        self.rows.drop(rows)

    def passes(
        self,
        chunk: MixedChunk | None = None,
        widths: Widths = NO_DRAFTS,
        unread: Results = NO_RESULTS,
    ) -> list[Pass]:
        self.rows.halve()
        return [Pass(group.rows, group.cache) for group in self.rows.groups]

    def cache_of(self, row: Row) -> RowCache | None:
        return None if self.rows.shared(row) else self.rows.cache_of(row)

    def merged(self) -> Mapping[Row, int]:
        return self.rows.merged()

    def extract(self, row: Row) -> RowCache:
        return self.rows.cache_of(row)


class GroupedLayout:
    """One pass over all groups."""

    name = "grouped"

    def __init__(self, *, padded: bool = False) -> None:
        self.rows = Groups(MERGED_BYTES)
        if padded:
            self.rows = Groups(PASS_BYTES, short=PADDED)
        self._joined: RowCache | None = None
        """The joint cache of several groups. `None`: it must be rebuilt."""
        self._members: list[Group] = []
        """The groups in the joint cache."""
        self._unsettled: dict[Row, Unsettled] = {}
        """Rows that had several tokens in the last pass, or that have followed an unread result."""
        self._since: dict[Row, int] = {}
        """Passes since the last drafts of rows that have a group of their own."""
        self._passes = 0
        self._lone: set[Row] = set()
        """Rows that were the only ones with their prefix at the last look."""

    def add(self, row: Row, cache: RowCache) -> None:
        self._split()
        self.rows.add(row, cache, apart=self._unsettled)  # whose length is not known yet

    def drop(self, rows: Sequence[Row]) -> None:
        self._split()
        self.rows.drop(rows)
        for row in rows:
            self._unsettled.pop(row, None)
            self._since.pop(row, None)
            self._lone.discard(row)

    def passes(
        self,
        chunk: MixedChunk | None = None,
        widths: Widths = NO_DRAFTS,
        unread: Results = NO_RESULTS,
    ) -> list[Pass]:
        self._settle()
        self._unite()
        self._reunite(widths)
        self._part(widths)
        if not self.rows.groups:
            return []
        groups = [g for g in self.rows.groups if g.rows[0] not in widths]
        together = self._together(groups)
        rows = [row for group in groups for row in group.rows]
        turned = [self._turned(row, tokens, unread.get(row)) for row, tokens in widths.items()]
        if chunk is not None:
            turned.append(chunk.turned)
        if not turned and together is not None:
            return [Pass(rows, together)]
        cache = with_wide_rows(together, _caches(groups), _sizes(groups), turned)
        return [Pass(rows, cache, tuple(widths), chunk)]

    def cache_of(self, row: Row) -> RowCache | None:
        return None if self.rows.shared(row) else self.rows.cache_of(row)

    def merged(self) -> Mapping[Row, int]:
        return self.rows.merged()

    def keep(self, row: Row, tokens: int) -> None:
        if row in self._unsettled:
            self._unsettled[row].keep(tokens)

    def may_look_ahead(self, row: Row) -> bool:
        return may_be_stale(self.rows.of(row).cache)

    def follow(self, row: Row) -> None:
        self._unsettled[row].follow()

    def extract(self, row: Row) -> RowCache:
        passes = self._unsettled.get(row)
        if passes is not None and passes.before is not None:
            self._unsettled.pop(row).take_back()
        self._settle()
        self._split()
        return self.rows.cache_of(row)

    def _settle(self) -> None:
        """Remove rejected drafts from the caches."""
        for row in [row for row, passes in self._unsettled.items() if passes.known]:
            self._unsettled.pop(row).settle()

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
        """Split groups above their bound, and give each row with drafts a group of its own."""
        shared = [row for row in widths if self.rows.shared(row)]
        if self.rows.outgrown or shared:
            self._split()
            self.rows.halve()
            self.rows.part(shared)

    def _turned(self, row: Row, tokens: int, unread: Unread | None) -> Turned:
        turned, before = Turned(self.rows.cache_of(row), tokens, drafts=True), None
        if unread is not None:
            passes = self._unsettled.get(row)
            before = passes.last if passes else Turned(turned.cache, 1)
            before.keep_unread(unread.held)
            if before.tokens > 1:
                turned.follow(before.tokens - 1 - unread.held)
        self._unsettled[row] = Unsettled(turned, before)
        return turned

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
    """The caches of the groups, for a pass over all of them."""
    for group in groups:
        group.share_offsets()
    return [group.cache for group in groups]


def _sizes(groups: Sequence[Group]) -> list[int]:
    return [len(group.rows) for group in groups]
