"""Guesses for all rows at once: the head sees what was said since, then its own guesses.

Nothing waits for the device: the model gets the guesses unread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol
from weakref import WeakSet

import mlx.core as mx

from mlx_provider.records import DeviceTokens, DraftRow, Unread

from .row_states import LONGEST, RowStates, States

log = logging.getLogger(__name__)

KV_BYTES = 2**29
"""That keys and values of all rows may take; one row is always followed."""
KV_SHARE = 4
"""Part of the room for a head and its rows that they may take at most."""
UNASKED = 4096
"""States of tokens that the engine keeps for all rows (`Drafter.context`)."""
TRIED = 500
"""First guesses after which a head is judged."""
CHANCE = 0.02
"""Share of them below which it knows nothing of the text."""


class GuessingHead(Protocol):
    """What guesses the token after each pair of a state and the token that was drawn from it."""

    @property
    def layers(self) -> int:
        """Its layers, which have keys and values."""

    @property
    def shown(self) -> Sequence[int]:
        """Layers of the model whose outputs are the states; none: those before its logits."""

    def after(self, tokens: mx.array, hidden: mx.array, states: Sequence[States]) -> mx.array:
        """States (T, width) after T tokens, each drawn from the state beside it. `hidden`: from
        the model, or from an earlier call. `states`: of each layer. What comes out is right for
        the last token of each row."""

    def best(self, hidden: mx.array) -> mx.array:
        """The tokens (T,) that most likely follow such states."""

    def blank(self) -> mx.array:
        """One state of the model, (1, width of its states), of zeros."""


@dataclass
class Known:
    """What is kept of a row from one call to the next."""

    states: RowStates
    guess: tuple[int, Unread | None, DeviceTokens] | None = None
    """Known tokens before its last guesses, unread ones before them, and what they were."""


@dataclass
class Judged:
    """How many of the first guesses held, to tell a head that is of no use."""

    name: str
    tried: int = 0
    guesses: list[tuple[DeviceTokens, int]] = field(default_factory=list)
    """Until there are enough: each guess, and the token that came."""

    def add(self, guess: DeviceTokens, token: int) -> None:
        """One more; says so once where they hold as seldom as by chance."""
        self.tried += 1
        if self.tried > TRIED:
            return
        self.guesses.append((guess.first(1), token))
        if self.tried < TRIED:
            return
        held = sum(guess[0] == token for guess, token in self.guesses)
        self.guesses.clear()
        if held < CHANCE * TRIED:
            log.warning(
                "%s drafts at chance: %d of %d first guesses held; it was not "
                "trained, or not with these weights. Set drafter: off, or another one",
                self.name,
                held,
                TRIED,
            )


class HeadDrafting:
    drafts_ahead = True

    def __init__(self, head: GuessingHead, name: str, *, kv_bytes: int = KV_BYTES) -> None:
        """`name`: what it is, and of which checkpoint; `kv_bytes`: for keys and values of all
        rows."""
        self.head = head
        self.judged = Judged(name)
        each = LONGEST * _token_bytes(head)
        self._places = max(1, kv_bytes // each)
        self.kv_bytes = self._places * each
        """That keys and values of all followed rows take at most."""
        self.kept_bytes = self.kv_bytes + UNASKED * head.blank().nbytes
        """The same, and states that the engine keeps until it asks."""
        self._followed: WeakSet[RowStates] = WeakSet()
        """Of the rows that the engine still knows."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """Greedy guesses, by one pass of the head for each; nothing is waited for."""
        able = [row for row in rows if row.hidden is not None and self._room(row)]
        if not able:
            return [[] for _ in rows]
        guesses = dict(zip(map(id, able), self._guess(able), strict=True))
        return [guesses.get(id(row), ()) for row in rows]

    def _room(self, row: DraftRow) -> bool:
        """Whether the row is followed, from now on if need be."""
        if row.state is None and len(self._followed) < self._places:
            row.state = Known(RowStates(self.head.layers))
            self._followed.add(row.state.states)
        return row.state is not None

    def _guess(self, rows: Sequence[DraftRow]) -> list[DeviceTokens]:
        known = [self._known(row) for row in rows]
        hidden = self._take_in(rows, known)
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
            going = [known[which].states for which in at]
            places = mx.array([len(rows[which].tokens) + step - 2 for which in at], mx.int32)
            places = places + _more(going)
            ones = [1] * len(at)
            hidden = _after(self.head, going, ones, places, tokens, hidden, behind=True)
        for row, own in zip(rows, known, strict=True):
            own.states.forget(row.wanted - 1)
        guesses = _by_row(len(rows), drawn)
        for row, own, each in zip(rows, known, guesses, strict=True):
            own.guess = len(row.tokens), row.unread, each
        return guesses

    def _known(self, row: DraftRow) -> Known:
        known: Known = row.state
        known.states.settle()
        known.states.bound()
        if known.guess is not None:
            place, unread, guesses = known.guess
            if unread is not None and unread.read is not None:
                place += unread.read + 1
            if place < len(row.tokens):
                self.judged.add(guesses, row.tokens[place])
        return known

    def _take_in(self, rows: Sequence[DraftRow], known: Sequence[Known]) -> mx.array:
        """Show the head what it has not seen; the states (rows, width) after each last token."""
        tokens: list[mx.array] = []
        sizes: list[int] = []
        places: list[int] = []
        for row, own in zip(rows, known, strict=True):
            tokens.append(mx.array(row.tokens[len(row.tokens) - row.fresh :], mx.int32))
            own.states.unread = row.unread
            if row.unread is not None:
                tokens.append(row.unread.tokens)
            sizes.append(row.fresh + own.states.unread_tokens)
            # a pair stands where its state does, one before its token
            first = len(row.tokens) - row.fresh - 1
            places += range(first, first + sizes[-1])
        states = [own.states for own in known]
        hidden = mx.concatenate([row.hidden for row in rows if row.hidden is not None])
        at = mx.array(places, mx.int32)
        after = _after(self.head, states, sizes, at, mx.concatenate(tokens), hidden)
        ends = zip(accumulate(sizes), states, strict=True)
        last = mx.array([end - 1 - own.unread_tokens for end, own in ends], mx.int32)
        return after[last + _more(states)]


def _more(rows: Sequence[RowStates]) -> mx.array:
    """How many unread tokens each row has more, (rows,) int32."""
    none = mx.zeros(1, mx.int32)
    return mx.concatenate([none if row.unread is None else row.unread.held + 1 for row in rows])


def kv_bytes(room: int | None) -> int:
    """For keys and values, of the room for a head and its rows."""
    return KV_BYTES if room is None else min(KV_BYTES, room // KV_SHARE)


def _after(
    head: GuessingHead,
    rows: Sequence[RowStates],
    sizes: Sequence[int],
    positions: mx.array,
    tokens: mx.array,
    hidden: mx.array,
    *,
    behind: bool = False,
) -> mx.array:
    layers, stale = zip(*(row.caches for row in rows), strict=True), [row.stale for row in rows]
    states = [States(each, sizes, positions, stale, behind=behind) for each in layers]
    return head.after(tokens, hidden, states)


def _token_bytes(head: GuessingHead) -> int:
    """Of the keys and values of a row's token."""
    seen = RowStates(head.layers)
    mx.eval(_after(head, [seen], [1], mx.array([0]), mx.array([0]), head.blank()))
    return seen.token_bytes


def _by_row(rows: int, drawn: list[tuple[list[int], mx.array]]) -> list[DeviceTokens]:
    """The guesses of all rounds, row by row."""
    flat = mx.concatenate([tokens for _, tokens in drawn])
    places: list[list[int]] = [[] for _ in range(rows)]
    for place, which in enumerate(which for at, _ in drawn for which in at):
        places[which].append(place)
    return [DeviceTokens(flat[mx.array(own)]) for own in places]
