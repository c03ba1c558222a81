"""Drafts by a small module that reads the states of all rows at once.

Nothing waits for the device: the model gets unread guesses, and the module reads unread
tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import mlx.core as mx

from mlx_provider.records import DeviceTokens, DraftRow

from .judged import Guess, Judged
from .row_states import WINDOW, RowStates, most_tokens

KV_BYTES = 2**29
"""That keys and values of all rows may take; one row is always followed."""
KV_SHARE = 4
"""Part of the room for a module and its rows that they may take at most."""
UNASKED = 4096
"""States of tokens that the engine keeps for all rows (`Drafter.context`)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one followed row."""

    layers: int
    """Number of layers of the module with keys and values."""
    token: int
    """Bytes of keys and values of a token in all layers."""
    state: int
    """Bytes of one state of the model."""
    window: int = WINDOW


@dataclass
class Known:
    """The data of a row between two calls."""

    states: RowStates
    guess: Guess | None = None


class FollowedRows(ABC):
    """A `Drafting`."""

    drafts_ahead = True

    def __init__(self, name: str, sizes: Sizes, kv_bytes: int) -> None:
        """`name`: kind and checkpoint of the drafter; `kv_bytes`: for keys and values of
        all rows."""
        self.judged = Judged(name)
        self._sizes = sizes
        each = most_tokens(sizes.window) * sizes.token
        self._places = max(1, kv_bytes // each)
        self.kv_bytes = self._places * each
        """That keys and values of all followed rows take at most."""
        self.kept_bytes = self.kv_bytes + UNASKED * sizes.state
        """The same, and states that the engine keeps until it asks."""
        self._followed: WeakSet[RowStates] = WeakSet()
        """Of the rows that the engine still knows."""

    @abstractmethod
    def guesses(self, rows: Sequence[DraftRow], seen: Sequence[RowStates]) -> list[DeviceTokens]:
        """Unread guesses, for each row at most as many as it wants. `seen`: the data that the
        module has read of these rows. Add their new states with `NewStates`."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """Greedy guesses. Does not wait for the device."""
        able = [row for row in rows if row.hidden is not None and self._room(row)]
        if not able:
            return [[] for _ in rows]
        found = self.guesses(able, [self._seen(row) for row in able])
        for row, tokens in zip(able, found, strict=True):
            row.state.guess = Guess.of(row, tokens)
        by_row = dict(zip(map(id, able), found, strict=True))
        return [by_row.get(id(row), ()) for row in rows]

    def _room(self, row: DraftRow) -> bool:
        """Whether the row is followed. A new row is followed if it fits into memory."""
        if row.state is None and len(self._followed) < self._places:
            row.state = Known(RowStates(self._sizes.layers, self._sizes.window))
            self._followed.add(row.state.states)
        return row.state is not None

    def _seen(self, row: DraftRow) -> RowStates:
        known: Known = row.state
        known.states.settle()
        unread = 0 if row.unread is None else row.unread.tokens.size
        known.states.make_room(row.fresh + unread + row.wanted)
        self.judged.look(known.guess, row.tokens)
        return known.states


class NewStates:
    """The new states of rows for a module: states of the model, each before the token that was
    drawn from it."""

    def __init__(self, rows: Sequence[DraftRow], seen: Sequence[RowStates]) -> None:
        """Records in `seen` which of them are unread."""
        self.sizes: list[int] = []
        """Of each row."""
        places: list[int] = []
        for row, own in zip(rows, seen, strict=True):
            own.unread = row.unread
            self.sizes.append(row.fresh + own.unread_tokens)
            first = len(row.tokens) - row.fresh - 1
            places += range(first, first + self.sizes[-1])
        self.places = mx.array(places, mx.int32)
        """Of all of them, (T,): a pair stands where its state does, one before its token."""
        self.hidden = mx.concatenate([row.hidden for row in rows if row.hidden is not None])
        """(T, width)"""


def last_token(row: DraftRow) -> mx.array:
    """(1,) int32"""
    if row.unread is None:
        return mx.array(row.tokens[-1:], mx.int32)
    return row.unread.tokens[row.unread.held]


def more(rows: Sequence[RowStates]) -> mx.array:
    """Number of accepted unread tokens of each row, (rows,) int32."""
    none = mx.zeros(1, mx.int32)
    return mx.concatenate([none if row.unread is None else row.unread.held + 1 for row in rows])


def kv_bytes(room: int | None) -> int:
    """Bytes for keys and values, of the memory for a module and its rows."""
    return KV_BYTES if room is None else min(KV_BYTES, room // KV_SHARE)
