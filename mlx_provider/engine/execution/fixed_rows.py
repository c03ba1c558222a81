"""A layout with passes of one size, for reproducible models.

Each row is its own group and attends only to its own keys, in arrays that it shares with no other
row. All other computation runs for `size` rows at once; filler rows replace missing ones. The place
of a row and the other rows do not change its result (`exactness` checks this at load).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...upstream.batch_caches import RowCache
from ..memory import leaves
from ..request import Row
from .batch_layout import NO_DRAFTS, NO_RESULTS, OneTokenLayout, Pass, Results, Widths
from .grouped_kv import GroupedKV, joined, split
from .mixed_chunk import MixedChunk


class FillerKV:
    """Attention cache of one layer for filler rows. Each row sees only its own token.

    The cache stores nothing, so it never grows.
    """

    offset = 0
    """Every token is the first."""

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        """No mask is needed."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The keys and values of the given tokens."""
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
    """The rows of one pass, padded to its size."""

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
        """The pass of these rows."""
        return Pass(self.rows, self._together or self._caches[0], fillers=self.missing)

    def part(self) -> None:
        """Give every row its recurrent state back."""
        if self._together is not None:
            split(self._together, self._caches, self._sizes)


class FixedLayout(OneTokenLayout):
    """Fills each pass with as many rows as fit. A row whose step failed has its own pass."""

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

    def passes(
        self,
        chunk: MixedChunk | None = None,
        widths: Widths = NO_DRAFTS,
        unread: Results = NO_RESULTS,
    ) -> list[Pass]:
        """Passes never include chunks or drafts."""
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
        """Rows by pass."""
        apart = [[row] for row in self._caches if row.retry_alone]
        others = [row for row in self._caches if not row.retry_alone]
        starts = range(0, len(others), self._size)
        return [*apart, *(others[at : at + self._size] for at in starts)]

    def _part(self, rows: Sequence[Row]) -> None:
        """Take apart the tiles that contain any of these rows."""
        touched = set(rows)
        for tile in [tile for tile in self._tiles if touched & {*tile.rows}]:
            tile.part()
            self._tiles.remove(tile)
