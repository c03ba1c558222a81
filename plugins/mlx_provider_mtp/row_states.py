"""Keys and values of the head's layer: of each row its own, seen by the layer as one cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from mlx_provider.families.caches import KVCache
from mlx_provider.records import Parts, Run

WINDOW = 1024
"""Tokens of a row that the head looks back on at least. Its states say much of what was before, and
memory stays flat however long a reply is."""
LONGEST = 2 * WINDOW
"""Tokens of a row that are kept at most."""


class RowStates:
    """What the head has seen of one row, at true positions."""

    def __init__(self) -> None:
        self.cache = KVCache()

    def forget(self, tokens: int) -> None:
        """Drop the last tokens, which were guesses."""
        self.cache.trim(tokens)

    def bound(self) -> None:
        """Drop what is outside the window."""
        if self.cache.offset <= LONGEST:
            return
        last = slice(self.cache.offset - WINDOW, self.cache.offset)
        keys, values = (each[..., last, :] for each in (self.cache.keys, self.cache.values))
        self.cache = KVCache()
        self.cache.update_and_fetch(keys, values)


class States:
    """Of some rows, for one call of the layer; each takes one token or several.

    To the layer each token is a row of its own, as where the model itself checks drafts. All see
    all of their row: what comes out is right for the last of them, which is all that is used.
    """

    def __init__(
        self, rows: Sequence[RowStates], sizes: Sequence[int], positions: Iterable[int]
    ) -> None:
        """`sizes`: tokens of each row; `positions`: of all of them, one row after the other."""
        edges = pairwise(accumulate(sizes, initial=0))
        self.runs = [
            Run(row.cache, slice(*at), turned=True) for row, at in zip(rows, edges, strict=True)
        ]
        self.offset = mx.array(list(positions), dtype=mx.int32)
        """(T,), under the name by which mlx-lm's layers ask for it."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Append (T, heads, 1, D); keys and values of each row, (1, heads, S, D)."""
        pairs = [
            run.cache.update_and_fetch(
                keys[run.rows].swapaxes(0, 2), values[run.rows].swapaxes(0, 2)
            )
            for run in self.runs
        ]
        all_keys, all_values = ([*each] for each in zip(*pairs, strict=True))
        return Parts(all_keys, self.runs), Parts(all_values, self.runs)
