"""Drafts of a head for all rows at once: it reads the new tokens, then its own guesses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import mlx.core as mx

from mlx_provider.records import DeviceTokens, DraftRow

from .followed_rows import KV_BYTES, FollowedRows, NewStates, Sizes, more
from .row_states import RowStates, States, by_layer


class GuessingHead(Protocol):
    """A module that predicts the next token from a state and the token that was drawn from it."""

    @property
    def layers(self) -> int:
        """Number of its layers, which have keys and values."""

    @property
    def shown(self) -> Sequence[int]:
        """Layers of the model whose outputs are the states; empty: the states before its logits."""

    def after(self, tokens: mx.array, hidden: mx.array, states: Sequence[States]) -> mx.array:
        """States (T, width) after T tokens, each drawn from the state with its index. `hidden`:
        from the model, or from an earlier call. `states`: of each layer. The result is valid for
        the last token of each row only."""

    def best(self, hidden: mx.array) -> mx.array:
        """The most likely next tokens (T,) after such states."""

    def blank(self) -> mx.array:
        """A state of zeros, (1, width of the model's states)."""


class HeadDrafting(FollowedRows):
    """One pass of the head for each guess."""

    def __init__(self, head: GuessingHead, name: str, *, kv_bytes: int = KV_BYTES) -> None:
        """See `FollowedRows`."""
        sizes = Sizes(head.layers, _token_bytes(head), head.blank().nbytes)
        super().__init__(name, sizes, kv_bytes)
        self.head = head

    def guesses(self, rows: Sequence[DraftRow], seen: Sequence[RowStates]) -> list[DeviceTokens]:
        hidden = self._take_in(rows, seen)
        at, drawn = list(range(len(rows))), []
        for step in range(1, 1 + max(row.wanted for row in rows)):
            tokens = self.head.best(hidden)
            mx.async_eval(tokens)  # type: ignore[no-untyped-call]
            drawn.append((at, tokens))
            stay = [i for i, which in enumerate(at) if rows[which].wanted > step]
            if not stay:
                break
            if len(stay) < len(at):
                at, keep = [at[i] for i in stay], mx.array(stay)
                tokens, hidden = tokens[keep], hidden[keep]
            going = [seen[which] for which in at]
            places = mx.array([len(rows[which].tokens) + step - 2 for which in at], mx.int32)
            places = places + more(going)
            ones = [1] * len(at)
            states = by_layer(going, ones, places, behind=True)
            hidden = self.head.after(tokens, hidden, states)
        for row, own in zip(rows, seen, strict=True):
            own.forget(row.wanted - 1)
        return _by_row(len(rows), drawn)

    def _take_in(self, rows: Sequence[DraftRow], seen: Sequence[RowStates]) -> mx.array:
        """Let the head read new tokens. Returns the states (rows, width) after each row's last
        token."""
        new, tokens = NewStates(rows, seen), list[mx.array]()
        for row in rows:
            tokens.append(mx.array(row.tokens[len(row.tokens) - row.fresh :], mx.int32))
            if row.unread is not None:
                tokens.append(row.unread.tokens)
        joined = mx.concatenate(tokens)
        states = by_layer(seen, new.sizes, new.places)
        after = self.head.after(joined, new.hidden, states)
        ends = zip(accumulate(new.sizes), seen, strict=True)
        last = mx.array([end - 1 - own.unread_tokens for end, own in ends], mx.int32)
        return after[last + more(seen)]


def _token_bytes(head: GuessingHead) -> int:
    """Bytes of the keys and values of one token."""
    seen = RowStates(head.layers)
    first = mx.array([0])
    mx.eval(head.after(first, head.blank(), by_layer([seen], [1], first)))
    return seen.token_bytes


def _by_row(rows: int, drawn: list[tuple[list[int], mx.array]]) -> list[DeviceTokens]:
    """The guesses of all rounds, row by row."""
    flat = mx.concatenate([tokens for _, tokens in drawn])
    places: list[list[int]] = [[] for _ in range(rows)]
    for place, which in enumerate(which for at, _ in drawn for which in at):
        places[which].append(place)
    return [DeviceTokens(flat[mx.array(own)]) for own in places]
