"""Keys and values of a head's layers: separate for each row, but one cache for a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from mlx_provider.families.caches import KVCache, append_behind, visible
from mlx_provider.records import Parts, Run, Unread

from . import CONTEXT

WINDOW = 1024
"""A module looks back on at least so many tokens of a row. Older ones are dropped before a row
takes more than twice as many: states say much of what was before, and memory stays flat however
long a reply is."""
STEP: int = KVCache.step
"""Tokens by which the capacity of a cache grows."""


def most_tokens(window: int) -> int:
    """The largest capacity of a row, in tokens: its window and the new tokens of one call."""
    return max(2 * window, window + CONTEXT + 2 * STEP)


class RowStates:
    """The tokens of one row that a module has read, at their real positions."""

    def __init__(self, layers: int = 1, window: int = WINDOW) -> None:
        self.caches = [KVCache() for _ in range(layers)]
        self._window = window
        self.unread: Unread | None = None
        """The result that its last tokens follow. Those that did not hold are still among them."""

    @property
    def unread_tokens(self) -> int:
        """Number of tokens of that result, accepted or not."""
        return 0 if self.unread is None else self.unread.tokens.size

    @property
    def stale(self) -> mx.array | None:
        """Number of stale tokens, (1,) int32."""
        if self.unread is None or self.unread_tokens == 1:
            return None
        return self.unread_tokens - 1 - self.unread.held

    def settle(self) -> None:
        """Remove the stale tokens. Raises `ValueError` if their number is not known yet."""
        if self.unread is None:
            return
        if self.unread.read is None:
            raise ValueError("a row is asked for again before its result is read")
        self.forget(self.unread_tokens - 1 - self.unread.read)
        self.unread = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token; 0: there is none."""
        known = [cache for cache in self.caches if cache.keys is not None]
        return sum(int((c.keys.nbytes + c.values.nbytes) // c.keys.shape[2]) for c in known)

    def forget(self, tokens: int) -> None:
        """Remove the last tokens, which were guesses."""
        for cache in self.caches:
            cache.trim(tokens)

    def make_room(self, more: int) -> None:
        """Remove tokens outside the window if the row could exceed `most_tokens` with so many new
        ones."""
        self.caches = [_with_room(cache, self._window, more) for cache in self.caches]


def _with_room(cache: KVCache, window: int, more: int) -> KVCache:
    fits = cache.offset + more + STEP <= most_tokens(window)
    if fits or cache.offset <= window:
        return cache
    last = slice(cache.offset - window, cache.offset)
    keys, values = (each[..., last, :] for each in (cache.keys, cache.values))
    bounded = KVCache()
    bounded.update_and_fetch(keys, values)
    return bounded


class States:
    """The states of some rows for one call of a layer. Each row has one token or several.

    The layer treats each token as a row, as in a pass of the model with drafts. Without masks, each
    token attends to all accepted tokens of its row. The result is then valid for the last token of
    a row, and only this is used of the last layer.
    """

    def __init__(
        self,
        caches: Sequence[KVCache],
        sizes: Sequence[int],
        positions: mx.array,
        stale: Sequence[mx.array | None] = (),
        *,
        behind: bool = False,
    ) -> None:
        """`sizes`: tokens of each row; `positions`: (T,) int32 of all tokens, one row after the
        other; `stale`: number of a row's last tokens that are rejected, (1,) int32. These are among
        its tokens here or, with `behind`, before its one token."""
        edges = pairwise(accumulate(sizes, initial=0))
        self.runs = [
            Run(cache, slice(*at), turned=True) for cache, at in zip(caches, edges, strict=True)
        ]
        self.offset = positions
        """Under the name by which mlx-lm's layers ask for it."""
        self._stale = stale or [None] * len(self.runs)
        self._behind = behind

    def masks(self) -> list[Any]:
        """Causal masks, one for each row. Call it before the tokens are appended."""
        whole = {"return_array": False, "window_size": None}
        return [
            run.cache.make_mask(run.rows.stop - run.rows.start, **whole)
            if stale is None or not self._behind
            else _hiding(run, stale)
            for run, stale in zip(self.runs, self._stale, strict=True)
        ]

    def mask(self) -> list[mx.array | None] | None:
        """Masks of the accepted tokens, one for each row. Call it before the tokens are
        appended."""
        if all(each is None for each in self._stale):
            return None
        return [
            None if stale is None else _hiding(run, stale)
            for run, stale in zip(self.runs, self._stale, strict=True)
        ]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Append (T, heads, 1, D). Returns keys and values of each row, (1, heads, S, D)."""
        pairs = [
            self._append(run, stale, keys[run.rows].swapaxes(0, 2), values[run.rows].swapaxes(0, 2))
            for run, stale in zip(self.runs, self._stale, strict=True)
        ]
        all_keys, all_values = ([*each] for each in zip(*pairs, strict=True))
        return Parts(all_keys, self.runs), Parts(all_values, self.runs)

    def _append(
        self, run: Run, stale: mx.array | None, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        if self._behind and stale is not None:
            return append_behind(run.cache, keys, values, stale)
        found: tuple[mx.array, mx.array] = run.cache.update_and_fetch(keys, values)
        return found


def by_layer(
    rows: Sequence[RowStates], sizes: Sequence[int], positions: mx.array, *, behind: bool = False
) -> list[States]:
    """`States` of each layer."""
    layers, stale = zip(*(row.caches for row in rows), strict=True), [row.stale for row in rows]
    return [States(each, sizes, positions, stale, behind=behind) for each in layers]


def _hiding(run: Run, stale: mx.array) -> mx.array:
    """(1, S) bool: false for the stale tokens that will be at the row's end."""
    columns = run.cache.offset + run.rows.stop - run.rows.start
    return visible(columns - 1 - stale, columns)
