"""Keys and values of a head's layer: separate per row, one cache for the layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from mlx_provider.families.caches import KVCache, append_behind, visible
from mlx_provider.records import Parts, Run, Unread

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
        self.unread: Unread | None = None
        """The result that contains its last tokens, accepted or rejected."""

    @property
    def unread_tokens(self) -> int:
        return 0 if self.unread is None else self.unread.tokens.size

    @property
    def stale(self) -> mx.array | None:
        """Rejected tokens in the cache, (1,) int32."""
        if self.unread is None or self.unread_tokens == 1:
            return None
        return self.unread_tokens - 1 - self.unread.held

    def settle(self) -> None:
        """Remove the rejected tokens. Raises `ValueError` if their number is not known yet."""
        if self.unread is None:
            return
        if self.unread.read is None:
            raise ValueError("a row is asked for again before its result is read")
        self.forget(self.unread_tokens - 1 - self.unread.read)
        self.unread = None

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
    Without masks, each token attends to all accepted tokens of its row, so only the result of a
    row's last token is valid."""

    def __init__(
        self,
        rows: Sequence[RowStates],
        sizes: Sequence[int],
        positions: mx.array,
        *,
        behind: bool = False,
    ) -> None:
        """`sizes`: tokens of each row; `positions`: (T,) int32, row after row. Rejected tokens are
        among them or, with `behind`, before the row's one token."""
        edges = pairwise(accumulate(sizes, initial=0))
        self.runs = [
            Run(row.cache, slice(*at), turned=True) for row, at in zip(rows, edges, strict=True)
        ]
        self.offset = positions
        """mlx-lm's layers ask for it by this name."""
        self._stale = [row.stale for row in rows]
        self._behind = behind

    def mask(self) -> list[mx.array | None] | None:
        """One per row, of the accepted tokens. Call it before the tokens are appended."""
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


def _hiding(run: Run, stale: mx.array) -> mx.array:
    """(1, S) bool: false for the rejected tokens at the row's end."""
    columns = run.cache.offset + run.rows.stop - run.rows.start
    return visible(columns - 1 - stale, columns)
