"""The caches of decoding rows, in groups, and the passes that the groups share.

- `solo`: each row has its own pass. Always correct.
- `merged`: a group has rows of similar length, in upstream's batch caches, and its own pass.
- `grouped`: all groups share one pass, which reads the weights once for any mix of lengths.
- `padded`: like `grouped`, but rows of up to 2,048 tokens share a group, whatever their lengths. On
  some GPUs, the operations that a further group launches in every layer take longer than padding.
- `fixed`: passes of one size, for reproducible models. Each row is its own group and attends only
  to its own keys; fillers replace missing rows. The place of a row and the other rows do not change
  its result (`reproducible.exact_rows` checks it).

The cache of a group is padded to its longest row and copied as a whole when a row joins or leaves.
So most groups have rows of similar length, and all have a limit in bytes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ...isolation import Fault, attempt
from ...upstream.batch_caches import RowCache, counting_alike, merge_rows, mergeable, rows_of
from ...upstream.cache_classes import by_layer, layers_of
from ...upstream.shared_kv import Prefix, prefix_of
from ..request import Row
from ..row_cache import profile
from ..scheduling.ledger import MemoryProfile, whole_steps
from .grouped_kv import MixedChunk, WideRow, fillers, join, split, with_wide_rows

log = logging.getLogger(__name__)

MERGED_BYTES, PASS_BYTES = 1 << 29, 1 << 32
"""Most bytes of a group that a row may join. In `grouped`, the first: it is copied in milliseconds.
Else the second: one more group costs more than an occasional copy."""
GROWN = 2  # a group is halved once its bytes exceed this multiple of `Layout.bound`
MAX_RATIO = 2.0  # longest row of a group over its shortest. Padding costs memory and compute
SHORT, PADDED = 256, 2048
"""Lengths of up to so many tokens count as similar: `PADDED` in the layout `padded`, else `SHORT`.
Rows that grow longer stay, as the padding does not grow. A further group takes the host of an H100
1.3 ms a step (16 groups 37 ms, one 17 ms), 2,048 tokens of padding 0.1 ms (by bandwidth)."""
REUNITED = 32
"""A row with drafts has a group of its own. After so many passes without drafts it is merged again,
because another group adds kernels to every pass."""
APART = ("solo", "fixed")  # layouts that merge no rows
Widths = Mapping[Row, int]
"""Token counts in a pass of the rows with drafts: the row's own token and its drafts."""
NO_WIDTHS: Widths = MappingProxyType({})


@dataclass(frozen=True)
class Pass:
    """One run of the model. Its tokens: one for each of `rows`, then for each of `drafting` its own
    token and its drafts, then those of `chunk` or of the fillers."""

    rows: list[Row]
    cache: RowCache
    drafting: Sequence[Row] = ()  # rows with drafts, which are not in `rows`
    chunk: MixedChunk | None = None
    fillers: int = 0  # number of padding rows. Nothing reads their results


@dataclass(eq=False)
class Group:
    rows: list[Row]
    cache: RowCache  # of the rows together
    memory: MemoryProfile
    alike: list[list[Any]]  # lists of layers that at first shared one array of offsets
    members: list[Row]  # the rows in `cache`, in its order, with those dropped since it was made
    apart: int = 0
    """Passes until its only row, which had drafts or a failed step, may share a group again."""

    @classmethod
    def of(
        cls, rows: list[Row], caches: Sequence[RowCache], memory: MemoryProfile, apart: int = 0
    ) -> Group:
        """Merges `caches`, which are those of the rows. `memory`: of one row."""
        together = merge_rows(caches) if len(caches) > 1 else caches[0]
        return cls(rows, together, memory, counting_alike(layers_of(together)), rows, apart)

    def caches(self, rows: Sequence[Row]) -> list[RowCache]:
        """Row caches of some of its rows. The cache of the group does not change."""
        if len(self.members) == 1:
            return [self.cache for _ in rows]
        return rows_of(self.cache, [self.members.index(row) for row in rows])

    def compact(self) -> Group:
        """The group in a cache without dropped rows."""
        if len(self.rows) == len(self.members):
            return self
        return Group.of(self.rows, self.caches(self.rows), self.memory, self.apart)

    def own_tokens(self, *more: Row) -> list[int]:
        """Tokens of each of its rows, then of `more`, without those of the shared prefix."""
        prefix = shared_prefix(self.cache)
        shared = 0 if prefix is None else prefix.length
        return [row.length_to_cache - shared for row in (*self.rows, *more)]

    def nbytes(self, *more: Row) -> int:
        """Bytes of its cache, with `more` rows in it."""
        lengths = self.own_tokens(*more)
        return len(lengths) * self.memory.row_bytes(max(lengths))

    def admits(self, row: Row, short: int, bound: int) -> bool:
        """Whether `row` may join: the lengths are similar, or all at most `short` tokens, and the
        group stays within `bound` bytes. If any row was preempted, no row may get more capacity."""
        lengths = self.own_tokens(row)
        preempted = any(member.gave_way for member in (row, *self.rows))
        if preempted and len({whole_steps(tokens + 1) for tokens in lengths}) > 1:
            return False
        similar = max(lengths) <= max(short, MAX_RATIO * min(lengths))
        return similar and self.nbytes(row) <= bound


class Tile:
    """Groups that share a pass. `size`: number of rows of the pass, with fillers. 0: no fillers."""

    def __init__(self, groups: list[Group], size: int) -> None:
        self.groups = groups
        self.rows = [row for group in groups for row in group.rows]
        self.sizes = [len(group.rows) for group in groups]
        self.missing = max(0, size - len(self.rows))
        self._own = self.caches()
        if self.missing:
            self._own.append([by_layer(fillers, layer) for layer in self._own[0]])
            self.sizes.append(self.missing)
        self.cache: RowCache = next(iter(self._own), [])
        if len(self._own) > 1:
            self.cache = join(self._own, self.sizes, apart=bool(size))

    def caches(self) -> list[RowCache]:
        """Caches of the groups. First, layers that are `alike` share one array of offsets again: a
        pass of one group alone has given each layer its own."""
        for group in self.groups:
            for first, *others in group.alike:
                for layer in others:
                    layer.offset = first.offset
        return [group.cache for group in self.groups]

    def split(self) -> None:
        if len(self._own) > 1:
            split(self.cache, self._own, self.sizes)


class Layout:
    """The groups of a batch. Methods for a row, except `drop`, are only for rows that it has."""

    def __init__(self, name: str, size: int = 0) -> None:
        """`size`: rows of each pass of the layout `fixed`, 0 for other layouts."""
        self.name = name
        self.bound = MERGED_BYTES if name == "grouped" else PASS_BYTES
        self.groups: list[Group] = []
        self._short = PADDED if name == "padded" else SHORT
        self._size = size
        self._tiles: list[Tile] = []
        self._unverified: dict[Row, WideRow] = {}  # rows that had several tokens in the last pass

    @property
    def one_pass(self) -> bool:
        """Whether all rows share one pass, which may have drafts and a chunk."""
        return self.name in ("grouped", "padded")

    def use(self, name: str) -> None:
        """Change to `solo`, or back to the first layout. The next `passes` moves the rows."""
        self.name = name
        for group in self.groups:
            group.apart = max(group.apart, int(len(group.rows) == 1))

    @property
    def pass_count(self) -> int:
        """Passes of a step without drafts and a chunk, at least 1."""
        if self.one_pass:
            return 1
        alone = sum(group.rows[0].retry_alone for group in self.groups)
        return max(1, alone + -(-(len(self.groups) - alone) // max(1, self._size)))

    def add(self, row: Row, cache: RowCache) -> None:
        """Add a row to the group that fits best. If none fits, or the caches cannot be merged, the
        row gets a group of its own. The layout owns `cache` from now on."""
        self._split()
        can_merge = self.name not in APART and not row.retry_alone and mergeable(cache)
        prefix = shared_prefix(cache)
        fits = [
            group
            for group in (self.groups if can_merge else ())
            if not group.apart  # the length after its drafts may not be known yet
            and shared_prefix(group.cache) is prefix
            and group.admits(row, self._short, self.bound)
        ]
        if fits:
            best = min(fits, key=lambda x: abs(x.rows[0].length_to_cache - row.length_to_cache))
            rows, memory = [*best.rows, row], best.memory
            # may fail, if the last pass of the group has failed
            together = attempt(lambda: Group.of(rows, [*best.caches(best.rows), cache], memory))
            if not isinstance(together, Fault):
                self.groups[self.groups.index(best)] = together
                return
            log.warning("a row cannot be merged with others: %s", together.summary)
        self.groups.append(Group.of([row], [cache], profile(cache), int(row.retry_alone)))

    def drop(self, rows: Collection[Row]) -> None:
        """Remove those of the rows that it has. The next `passes` frees their part of a cache."""
        self._split()
        rest = [(group, [row for row in group.rows if row not in rows]) for group in self.groups]
        self.groups = [replace(group, rows=own) for group, own in rest if own]
        for row in rows:
            self._unverified.pop(row, None)

    def cache_of(self, row: Row) -> RowCache | None:
        """The row's own cache. `None`: it is merged with others, or the layout is `fixed`."""
        group = self._group(row)
        return None if self._size or len(group.members) > 1 else group.cache

    def extract(self, row: Row) -> RowCache:
        """A cache of that row alone, made of views: reading some tokens copies only those."""
        self._settle()
        self._split()
        return self._group(row).caches([row])[0]

    def merged_lengths(self) -> dict[Row, int]:
        """The value of `Row.merged_length` for each row that has a cache with others."""
        several = [group.rows for group in self.groups if len(group.rows) > 1]
        longest = [(rows, max(row.length_to_cache for row in rows)) for rows in several]
        return {row: length + 1 for rows, length in longest for row in rows}

    def keep_tokens(self, row: Row, tokens: int) -> None:
        """Keep only the first `tokens` of the row's tokens in the last pass, at least one. Does
        nothing if it had no drafts. The last call before another use of the row counts."""
        if row in self._unverified:
            self._unverified[row].kept = tokens

    def passes(self, chunk: MixedChunk | None = None, widths: Widths = NO_WIDTHS) -> list[Pass]:
        """The passes of a step, in which every row has one token, or as many as in `widths`. A row
        whose step failed has its own pass. `chunk` and `widths` are only for a layout with
        `one_pass`. Call `keep_tokens` for each row in `widths` before any other use of the row."""
        self._settle()
        self._reunite(widths)
        self._separate(widths)
        self._compact()
        if not self.groups:
            return []
        plain = [group for group in self.groups if group.rows[0] not in widths]
        alone = [[group] for group in plain if group.rows[0].retry_alone]
        others = [group for group in plain if not group.rows[0].retry_alone]
        size = max(1, len(others) if self.one_pass else self._size)
        wanted = alone + [others[at : at + size] for at in range(0, len(others), size)]
        if wanted != [tile.groups for tile in self._tiles]:
            self._split()
            self._tiles = [Tile(groups, self._size) for groups in wanted]
        passes = [Pass(tile.rows, tile.cache, fillers=tile.missing) for tile in self._tiles]
        drafting = {
            row: WideRow(self._group(row).cache, tokens, drafts=True)
            for row, tokens in widths.items()
        }
        self._unverified |= drafting
        wide = [*drafting.values(), *([] if chunk is None else [chunk.wide])]
        if wide and self.one_pass:
            tile = self._tiles[-1] if others else Tile([], 0)
            cache = with_wide_rows(tile.cache, tile.caches(), tile.sizes, wide)
            passes[len(alone) :] = [Pass(tile.rows, cache, tuple(widths), chunk)]
        return passes

    def _split(self) -> None:
        """Give each group its recurrent state back and drop the tiles, before groups change."""
        for tile in self._tiles:
            tile.split()
        self._tiles = []

    def _settle(self) -> None:
        """Remove the rejected tokens of rows for which `keep_tokens` was called."""
        for row in [row for row, wide in self._unverified.items() if wide.kept is not None]:
            self._unverified.pop(row).settle()

    def _group(self, row: Row) -> Group:
        return next(group for group in self.groups if row in group.rows)

    def _reunite(self, widths: Widths) -> None:
        """Let rows without recent drafts join the groups of other rows again."""
        waiting = [g for g in self.groups if g.apart and g.rows[0] not in widths]
        for group in waiting:
            group.apart -= 1
        due = [group for group in waiting if not group.apart]
        for group in due if len(self.groups) > 1 else ():
            self.drop(group.rows)
            self.add(group.rows[0], *group.caches(group.rows))

    def _compact(self) -> None:
        if any(len(group.rows) < len(group.members) for group in self.groups):
            self._split()
            self.groups = [group.compact() for group in self.groups]

    def _separate(self, widths: Widths) -> None:
        """Give rows with drafts groups of their own, or all rows, if the layout merges none. Halve
        groups that exceed the limit, with the shorter rows in one half."""
        several = [row for group in self.groups if group.rows[1:] for row in group.rows]
        shared = [row for row in several if row in widths or self.name in APART]
        if shared:
            alone = [Group.of([r], [self.extract(r)], self._group(r).memory) for r in shared]
            self.drop(shared)
            self.groups += alone
        for row in widths:
            self._group(row).apart = REUNITED
        limit = GROWN * self.bound
        while grown := next((g for g in self.groups if g.rows[1:] and g.nbytes() > limit), None):
            self._split()
            rows = sorted(grown.rows, key=lambda row: row.length_to_cache)
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            at = self.groups.index(grown)
            self.groups[at : at + 1] = [replace(grown, rows=half) for half in halves]


def shared_prefix(cache: RowCache) -> Prefix | None:
    """The prefix that rows of this cache share with others, in its first layer that has one."""
    found = (prefix_of(layer) for layer in layers_of(cache))
    return next((prefix for prefix in found if prefix is not None), None)
