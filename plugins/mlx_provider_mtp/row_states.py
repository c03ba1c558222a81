"""Keys and values of a head's layer: separate per row, one cache for the layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from mlx_provider.families.caches import KVCache
from mlx_provider.records import Parts, Run

WINDOW = 1024
"""Tokens of a row that a head attends to at least. Older ones are dropped before a row exceeds
twice as many, so that memory does not grow with a reply; states carry earlier context."""
STEP: int = KVCache.step
MOST_TOKENS = 2 * WINDOW
"""Largest capacity of a row: its window and the new tokens of one call."""


class RowStates:
    """The tokens of one row that a head has read, at their real positions."""

    def __init__(self) -> None:
        self.cache = KVCache()

    @property
    def token_bytes(self) -> int:
        """0: there is no token."""
        keys, values = self.cache.keys, self.cache.values
        return 0 if keys is None else int((keys.nbytes + values.nbytes) // keys.shape[2])

    def forget(self, tokens: int) -> None:
        self.cache.trim(tokens)

    def make_room(self, more: int) -> None:
        """Remove tokens outside the window if the row could exceed `MOST_TOKENS`."""
        cache = self.cache
        if cache.offset + more + STEP <= MOST_TOKENS or cache.offset <= WINDOW:
            return
        last = slice(cache.offset - WINDOW, cache.offset)
        self.cache = KVCache()
        self.cache.update_and_fetch(cache.keys[..., last, :], cache.values[..., last, :])


class States:
    """The states of some rows for one call of the layer. The layer treats each token as a row.
    Without masks, each token attends to all tokens of its row, so only the result of a row's last
    token is valid."""

    def __init__(
        self, rows: Sequence[RowStates], sizes: Sequence[int], positions: mx.array
    ) -> None:
        """`sizes`: tokens of each row; `positions`: (T,) int32, row after row."""
        edges = pairwise(accumulate(sizes, initial=0))
        self.runs = [
            Run(row.cache, slice(*at), turned=True) for row, at in zip(rows, edges, strict=True)
        ]
        self.offset = positions
        """mlx-lm's layers ask for it by this name."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Append (T, heads, 1, D). Returns keys and values of each row, (1, heads, S, D)."""
        pairs = [
            run.cache.update_and_fetch(
                keys[run.rows].swapaxes(0, 2), values[run.rows].swapaxes(0, 2)
            )
            for run in self.runs
        ]
        all_keys, all_values = ([*each] for each in zip(*pairs, strict=True))
        return Parts(all_keys, self.runs), Parts(all_values, self.runs)
