"""Drafts of an MTP head for all rows at once. The head reads the new tokens of each row, then its
own guesses, which stay on the device."""

from collections.abc import Sequence
from itertools import accumulate
from weakref import WeakSet

import mlx.core as mx

from mlx_provider.families.caches import KVCache, PackedRows
from mlx_provider.records import DeviceTokens, DraftRow

from .head import BoundHead

KV_BYTES = 2**29
"""Limit of the head's keys and values of all rows; one row is always allowed."""
KV_SHARE = 4
"""Keys and values take at most 1/4 of the memory for a head and its rows."""
UNASKED = 4096
"""The engine's limit: most tokens, of all rows, whose states it keeps until it asks the head."""
WINDOW = 1024
"""Last tokens that a head attends to at least. Older ones go before a row has twice as many."""
STEP: int = KVCache.step
MOST_TOKENS = 2 * WINDOW
"""Largest capacity of a row: its window and the new tokens of one call."""


class RowStates:
    """Keys and values of the tokens of one row that a head has read, at their real positions."""

    def __init__(self) -> None:
        self.cache = KVCache()

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values per token; 0: there is no token."""
        keys, values = self.cache.keys, self.cache.values
        return 0 if keys is None else int((keys.nbytes + values.nbytes) // keys.shape[2])

    def make_room(self, more: int) -> None:
        """Drop tokens outside the window if `more` tokens could exceed `MOST_TOKENS`."""
        cache = self.cache
        if cache.offset + more + STEP <= MOST_TOKENS or cache.offset <= WINDOW:
            return
        last = slice(cache.offset - WINDOW, cache.offset)
        self.cache = KVCache()
        self.cache.update_and_fetch(cache.keys[..., last, :], cache.values[..., last, :])


class HeadDrafting:
    """The `Drafting` of one head. `kv_bytes`: limit of the keys and values of all rows."""

    def __init__(self, head: BoundHead, *, kv_bytes: int = KV_BYTES) -> None:
        self.head = head
        most = MOST_TOKENS * _token_bytes(head)
        self._max_rows = max(1, kv_bytes // most)
        self.kv_bytes = self._max_rows * most
        self.kept_bytes = self.kv_bytes + UNASKED * head.blank().nbytes
        """`kv_bytes`, and the states that the engine keeps."""
        self._row_states: WeakSet[RowStates] = WeakSet()

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """The most likely tokens; empty for a row without states or memory. Waits for nothing."""
        able = [row for row in rows if row.hidden is not None and self._has_state(row)]
        if not able:
            return [[] for _ in rows]
        found = self._guesses(able, max(row.wanted for row in able))
        by_row = dict(zip(map(id, able), found, strict=True))
        return [by_row.get(id(row), ()) for row in rows]

    def _has_state(self, row: DraftRow) -> bool:
        """Whether the row has a state, which it gets at its first draft if there is memory."""
        if row.state is None and len(self._row_states) < self._max_rows:
            row.state = RowStates()
            self._row_states.add(row.state)
        return row.state is not None

    def _guesses(self, rows: Sequence[DraftRow], most: int) -> list[DeviceTokens]:
        """Guess `most` tokens for each row. Returns as many of them as the row wants."""
        seen: list[RowStates] = [row.state for row in rows]
        for row, own in zip(rows, seen, strict=True):
            own.make_room(row.fresh + most)
        hidden, drawn = self._take_in(rows, seen), list[mx.array]()
        for step in range(most):
            if step:
                places = mx.array([len(row.tokens) + step - 2 for row in rows], mx.int32)
                states = _pack(seen, [1] * len(rows), places)
                hidden = self.head.after(drawn[-1], hidden, states)
            drawn.append(self.head.best(hidden))
            mx.async_eval(drawn[-1])  # type: ignore[no-untyped-call]
        for own in seen:
            own.cache.trim(most - 1)  # the guesses that the head has read
        guesses = mx.stack(drawn, axis=1)
        return [DeviceTokens(guesses[i, : row.wanted]) for i, row in enumerate(rows)]

    def _take_in(self, rows: Sequence[DraftRow], seen: Sequence[RowStates]) -> mx.array:
        """The head reads new tokens, each with the state from which it was drawn. Returns the
        states (rows, width) after each row's last token."""
        sizes, places, tokens = list[int](), list[int](), list[int]()
        for row in rows:
            first = len(row.tokens) - row.fresh
            tokens += row.tokens[first:]
            sizes.append(row.fresh)
            places += range(first - 1, len(row.tokens) - 1)  # positions of the states
        hidden = mx.concatenate([row.hidden for row in rows if row.hidden is not None])
        states = _pack(seen, sizes, mx.array(places, mx.int32))
        after = self.head.after(mx.array(tokens, mx.int32), hidden, states)
        return after[mx.array([end - 1 for end in accumulate(sizes)], mx.int32)]


def kv_bytes(room: int | None) -> int:
    """The limit for `HeadDrafting` if head and rows may take `room` bytes (`None`: any number)."""
    return KV_BYTES if room is None else min(KV_BYTES, room // KV_SHARE)


def _token_bytes(head: BoundHead) -> int:
    """Bytes of keys and values per token, by a trial."""
    seen, first = RowStates(), mx.array([0])
    mx.eval(head.after(first, head.blank(), _pack([seen], [1], first)))
    return seen.token_bytes


def _pack(rows: Sequence[RowStates], sizes: Sequence[int], positions: mx.array) -> PackedRows:
    """For one call of the layer, without masks: each token attends to its whole row, so only the
    result of a row's last token is valid. `sizes`: tokens of each row; `positions`: (T,) int32."""
    return PackedRows([row.cache for row in rows], sizes, positions)
