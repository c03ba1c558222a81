"""Keys and values of a head's layers: of each row its own, seen by a layer as one cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

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

    def __init__(self, layers: int = 1) -> None:
        self.caches = [KVCache() for _ in range(layers)]

    @property
    def token_bytes(self) -> int:
        """Of a token; 0: it has seen none."""
        known = [cache for cache in self.caches if cache.keys is not None]
        return sum(int((c.keys.nbytes + c.values.nbytes) // c.keys.shape[2]) for c in known)

    def forget(self, tokens: int) -> None:
        """Drop the last tokens, which were guesses."""
        for cache in self.caches:
            cache.trim(tokens)

    def bound(self) -> None:
        """Drop what is outside the window."""
        self.caches = [_bounded(cache) for cache in self.caches]


def _bounded(cache: KVCache) -> KVCache:
    if cache.offset <= LONGEST:
        return cache
    last = slice(cache.offset - WINDOW, cache.offset)
    keys, values = (each[..., last, :] for each in (cache.keys, cache.values))
    window = KVCache()
    window.update_and_fetch(keys, values)
    return window


class States:
    """Of some rows, for one call of a layer; each takes one token or several.

    To the layer each token is a row of its own, as where the model itself checks drafts. Without
    the masks, all see all of their row: what comes out is right for the last of them, which is all
    that is used of the last layer.
    """

    def __init__(
        self, caches: Sequence[KVCache], sizes: Sequence[int], positions: Iterable[int]
    ) -> None:
        """`sizes`: tokens of each row; `positions`: of all of them, one row after the other."""
        edges = pairwise(accumulate(sizes, initial=0))
        self.runs = [
            Run(cache, slice(*at), turned=True) for cache, at in zip(caches, edges, strict=True)
        ]
        self.offset = mx.array(list(positions), dtype=mx.int32)
        """(T,), under the name by which mlx-lm's layers ask for it."""

    def masks(self) -> list[Any]:
        """Of each row, so that a token sees none behind it. Ask before the tokens are appended."""
        whole = {"return_array": False, "window_size": None}
        return [run.cache.make_mask(run.rows.stop - run.rows.start, **whole) for run in self.runs]

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
