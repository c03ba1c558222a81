"""Keys and values of a head's layer: separate for each row, but one cache for the layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from mlx_provider.families.caches import KVCache, append_behind, visible
from mlx_provider.records import Parts, Run, Unread

WINDOW = 1024
"""A head looks back on at least so many tokens of a row. Older ones are dropped before a row takes
more than twice as many: states say much of what was before, and memory stays flat however long a
reply is."""
STEP: int = KVCache.step
"""Tokens by which the capacity of a cache grows."""
MOST_TOKENS = 2 * WINDOW
"""The largest capacity of a row, in tokens: its window and the new tokens of one call."""


class RowStates:
    """The tokens of one row that a head has read, at their real positions."""

    def __init__(self) -> None:
        self.cache = KVCache()
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
        keys, values = self.cache.keys, self.cache.values
        return 0 if keys is None else int((keys.nbytes + values.nbytes) // keys.shape[2])

    def forget(self, tokens: int) -> None:
        """Remove the last tokens, which were guesses."""
        self.cache.trim(tokens)

    def make_room(self, more: int) -> None:
        """Remove tokens outside the window if the row could exceed `MOST_TOKENS` with so many new
        ones."""
        cache = self.cache
        if cache.offset + more + STEP <= MOST_TOKENS or cache.offset <= WINDOW:
            return
        last = slice(cache.offset - WINDOW, cache.offset)
        self.cache = KVCache()
        self.cache.update_and_fetch(cache.keys[..., last, :], cache.values[..., last, :])


class States:
    """The states of some rows for one call of the layer. Each row has one token or several.

    The layer treats each token as a row, as in a pass of the model with drafts. Without masks, each
    token attends to all accepted tokens of its row. The result is then valid for the last token of
    a row, and only this is used.
    """

    def __init__(
        self,
        rows: Sequence[RowStates],
        sizes: Sequence[int],
        positions: mx.array,
        *,
        behind: bool = False,
    ) -> None:
        """`sizes`: tokens of each row; `positions`: (T,) int32 of all tokens, one row after the
        other. Rejected tokens are among its tokens here or, with `behind`, before its one token."""
        edges = pairwise(accumulate(sizes, initial=0))
        self.runs = [
            Run(row.cache, slice(*at), turned=True) for row, at in zip(rows, edges, strict=True)
        ]
        self.offset = positions
        """Under the name by which mlx-lm's layers ask for it."""
        self._stale = [row.stale for row in rows]
        self._behind = behind

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


def _hiding(run: Run, stale: mx.array) -> mx.array:
    """(1, S) bool: false for the stale tokens that will be at the row's end."""
    columns = run.cache.offset + run.rows.stop - run.rows.start
    return visible(columns - 1 - stale, columns)
