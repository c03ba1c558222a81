"""How the caches of decoding rows lie together. Three layouts behind one interface.

- `solo`: every row decodes by itself. Always right.
- `merged`: rows of similar length share upstream's batch caches; one pass per such group.
- `grouped`: the same groups in one pass: recurrent state is batched over all rows, and each
  group's attention is computed on its own (needs `upstream.attention.route`).

A row's cache is its own until another row joins its group, and again once it is the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from ...upstream.attention import Parts, Run
from ..request import Row
from .piggyback import ChunkKV, PiggybackedChunk, as_rows

GROUP_TOKENS = 32_768
"""Rows times longest length of one group: a join or leave copies the whole group's KV."""
MIN_ROWS = 8
"""Rows that a group may have however long they are."""
MAX_RATIO = 2.0
"""Longest over shortest row of a group: padding costs memory and compute."""
SHORT = 256
"""Below this many tokens lengths count as similar whatever their ratio."""

RowCache = list[Any]


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
        """A cache of that row alone. The layout's arrays are not changed by it."""


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


@dataclass
class Group:
    """Rows of similar length; with one row `cache` is that row's own."""

    rows: list[Row]
    cache: RowCache

    def admits(self, row: Row) -> bool:
        """Whether `row` is close enough in length, and there is room."""
        lengths = [r.length for r in self.rows] + [row.length]
        longest, count = max(lengths), len(lengths)
        if count > MIN_ROWS and count * longest > GROUP_TOKENS:
            return False
        return longest <= max(SHORT, MAX_RATIO * min(lengths))

    def add(self, row: Row, cache: RowCache) -> None:
        if len(self.rows) == 1:
            self.cache = [merged([a, b]) for a, b in zip(self.cache, cache, strict=True)]
        else:
            for own, new in zip(self.cache, cache, strict=True):
                own.extend(merged([new]))
        self.rows.append(row)

    def keep(self, indices: list[int]) -> None:
        """Only these rows stay."""
        if len(indices) == 1 and len(self.rows) > 1:
            self.cache = [layer.extract(indices[0]) for layer in self.cache]
        elif len(indices) < len(self.rows):
            for layer in self.cache:
                layer.filter(indices)
        self.rows = [self.rows[i] for i in indices]

    def extract(self, row: Row) -> RowCache:
        if len(self.rows) == 1:
            return self.cache
        index = self.rows.index(row)
        return [layer.extract(index) for layer in self.cache]


def merged(caches: list[Any]) -> Any:
    """Upstream's batch cache over row caches of one layer."""
    return type(caches[0]).merge(caches)


def mergeable(cache: Sequence[Any]) -> bool:
    """Whether every layer of a row cache has an upstream batch form."""
    return all(
        mergeable(layer.caches) if hasattr(layer, "caches") else hasattr(type(layer), "merge")
        for layer in cache
    )


@dataclass
class MergedLayout:
    """One pass per group of similar length."""

    name: str = "merged"
    groups: list[Group] = field(default_factory=list)

    def add(self, row: Row, cache: RowCache) -> None:
        place(self.groups, row, cache)

    def drop(self, rows: Sequence[Row]) -> None:
        remove(self.groups, rows)

    def passes(self, chunk: PiggybackedChunk | None = None) -> list[Pass]:
        return [Pass(group.rows, group.cache) for group in self.groups]

    def extract(self, row: Row) -> RowCache:
        return next(g for g in self.groups if row in g.rows).extract(row)


def place(groups: list[Group], row: Row, cache: RowCache) -> None:
    """Put a row into the group it fits best, or into one of its own."""
    fits = [g for g in groups if mergeable(cache) and g.admits(row)]
    if fits:
        min(fits, key=lambda g: abs(g.rows[0].length - row.length)).add(row, cache)
    else:
        groups.append(Group([row], cache))


def remove(groups: list[Group], rows: Sequence[Row]) -> None:
    """Take rows out of their groups; empty groups go."""
    gone = set(rows)
    for group in groups:
        stay = [i for i, row in enumerate(group.rows) if row not in gone]
        if stay:
            group.keep(stay)
        else:
            group.rows = []
    groups[:] = [g for g in groups if g.rows]


class GroupedKV:
    """The attention caches of one layer, one per group, seen by the model as one cache."""

    def __init__(self, parts: list[Any], sizes: list[int]) -> None:
        self.parts = parts
        self.sizes = sizes
        self.runs = runs(parts, sizes)

    @property
    def offset(self) -> mx.array:
        """Rotary offset of every row, (B,) int32."""
        each = [
            part.offset if isinstance(part.offset, mx.array) else mx.array([part.offset] * size)
            for part, size in zip(self.parts, self.sizes, strict=True)
        ]
        return mx.concatenate(each)

    def make_mask(self, *args: Any, **kwargs: Any) -> list[Any]:
        """One mask per group."""
        return [part.make_mask(*args, **kwargs) for part in self.parts]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Append each group's rows to its cache; keys and values per group."""
        pairs = [
            part.update_and_fetch(keys[run.rows], values[run.rows])
            for part, run in zip(self.parts, self.runs, strict=True)
        ]
        all_keys, all_values = (list(each) for each in zip(*pairs, strict=True))
        return Parts(all_keys, self.runs), Parts(all_values, self.runs)


def runs(parts: Sequence[Any], sizes: Sequence[int]) -> list[Run]:
    """Which rows of a layer each of its caches has."""
    edges = itertools.accumulate(sizes, initial=0)
    return [
        Run(part.inner, slice(*rows), turned=True)
        if isinstance(part, ChunkKV)
        else Run(part, slice(*rows))
        for part, rows in zip(parts, itertools.pairwise(edges), strict=True)
    ]


class GroupedLayout:
    """One pass over all groups."""

    name = "grouped"

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._joined: RowCache | None = None
        """The cache of all groups together while there are several; `None`: build it anew."""

    def add(self, row: Row, cache: RowCache) -> None:
        self._split()
        place(self.groups, row, cache)

    def drop(self, rows: Sequence[Row]) -> None:
        self._split()
        remove(self.groups, rows)

    def passes(self, chunk: PiggybackedChunk | None = None) -> list[Pass]:
        if chunk is not None and self.groups:
            return [self._with(chunk)]
        if len(self.groups) < 2:
            return [Pass(group.rows, group.cache) for group in self.groups]
        if self._joined is None:
            sizes = [len(g.rows) for g in self.groups]
            layers = zip(*(g.cache for g in self.groups), strict=True)
            self._joined = [joined(list(layer), sizes) for layer in layers]
        return [Pass([row for g in self.groups for row in g.rows], self._joined)]

    def _with(self, chunk: PiggybackedChunk) -> Pass:
        """All groups and a chunk, which has attention layers alone: nothing is to be split."""
        count = len(chunk.tokens)
        sizes = [*(len(g.rows) for g in self.groups), count]
        piggybacked = [as_rows(layer, count) for layer in chunk.cache]
        layers = zip(*(g.cache for g in self.groups), piggybacked, strict=True)
        cache = [joined(list(layer), sizes) for layer in layers]
        return Pass([row for g in self.groups for row in g.rows], cache, chunk)

    def extract(self, row: Row) -> RowCache:
        self._split()
        return next(g for g in self.groups if row in g.rows).extract(row)

    def _split(self) -> None:
        """Give every group its recurrent state back before groups change."""
        if self._joined is None:
            return
        sizes = [len(g.rows) for g in self.groups]
        for index, layer in enumerate(self._joined):
            split(layer, [g.cache[index] for g in self.groups], sizes)
        self._joined = None


def joined(parts: list[Any], sizes: list[int]) -> Any:
    """One layer's caches of all groups as the model shall see them."""
    first = parts[0]
    if hasattr(first, "caches"):
        inner = zip(*(part.caches for part in parts), strict=True)
        together = type(first)()
        together.caches = tuple(joined(list(each), sizes) for each in inner)
        return together
    if hasattr(first, "update_and_fetch"):
        return GroupedKV(parts, sizes)
    together = _same_state(first)
    for part in parts[1:]:
        together.extend(part)
    return together


def _same_state(state: Any) -> Any:
    """A recurrent cache with the same arrays, so that extending it leaves the group's alone."""
    copy = type(state)(len(state.cache))
    copy.cache = list(state.cache)
    return copy


def split(layer: Any, parts: list[Any], sizes: list[int]) -> None:
    """Undo `joined` for recurrent state; attention caches were shared, not copied."""
    if hasattr(layer, "caches"):
        for index, inner in enumerate(layer.caches):
            split(inner, [part.caches[index] for part in parts], sizes)
    elif not isinstance(layer, GroupedKV):
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            part.cache = [None if a is None else a[start : start + size] for a in layer.cache]
            start += size
