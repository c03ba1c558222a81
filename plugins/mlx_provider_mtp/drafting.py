"""Guesses for all rows at once: the head sees what was said since, then its own guesses.

Nothing waits for the device: the model gets the guesses unread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakSet

import mlx.core as mx

from mlx_provider.records import DeviceTokens, DraftRow

from .head import BoundHead
from .row_states import LONGEST, RowStates, States

log = logging.getLogger(__name__)

KV_BYTES = 2**29
"""That keys and values of all rows may take; one row is always followed."""
KV_SHARE = 4
"""Part of the room for a head and its rows that they may take at most."""
TRIED = 500
"""First guesses after which a head is judged."""
CHANCE = 0.02
"""Share of them below which it knows nothing of the text."""


@dataclass
class Known:
    """What is kept of a row from one call to the next."""

    states: RowStates = field(default_factory=RowStates)
    guess: tuple[int, DeviceTokens] | None = None
    """Where its last guesses stand, and what they were."""


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
                "the MTP head of %s drafts at chance: %d of %d first guesses held; it was not "
                "trained, or not with these weights. Set drafter: off, or another one",
                self.name,
                held,
                TRIED,
            )


class HeadDrafting:
    def __init__(self, head: BoundHead, name: str, *, kv_bytes: int = KV_BYTES) -> None:
        """`name`: of the checkpoint; `kv_bytes`: for keys and values of all rows."""
        self.head = head
        self.judged = Judged(name)
        each = LONGEST * head.token_bytes()
        self._places = max(1, kv_bytes // each)
        self.kv_bytes = self._places * each
        """That keys and values of all followed rows take at most."""
        self._followed: WeakSet[RowStates] = WeakSet()
        """Of the rows that the engine still knows."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """Greedy guesses, by one pass of the head for each; nothing is waited for."""
        able = [row for row in rows if row.fresh and row.hidden is not None and self._room(row)]
        if not able:
            return [[] for _ in rows]
        guesses = dict(zip(map(id, able), self._guess(able), strict=True))
        return [guesses.get(id(row), ()) for row in rows]

    def _room(self, row: DraftRow) -> bool:
        """Whether the row is followed, from now on if need be."""
        if row.state is None and len(self._followed) < self._places:
            row.state = Known()
            self._followed.add(row.state.states)
        return row.state is not None

    def _guess(self, rows: Sequence[DraftRow]) -> list[DeviceTokens]:
        known = [self._known(row) for row in rows]
        hidden = self._take_in(rows, known)
        at, drawn = list(range(len(rows))), []
        for step in range(1, 1 + max(row.wanted for row in rows)):
            tokens = mx.argmax(self.head.logits(hidden), axis=-1)
            mx.async_eval(tokens)  # type: ignore[no-untyped-call]
            drawn.append((at, tokens))
            stay = [i for i, which in enumerate(at) if rows[which].wanted > step]
            if not stay:
                break
            if len(stay) < len(at):
                at, keep = [at[i] for i in stay], mx.array(stay)
                tokens, hidden = tokens[keep], hidden[keep]
            hidden = self._pass(
                [known[which] for which in at],
                [1] * len(at),
                [len(rows[which].tokens) + step - 2 for which in at],
                tokens,
                hidden,
            )
        for row, own in zip(rows, known, strict=True):
            own.states.forget(row.wanted - 1)
        guesses = _by_row(len(rows), drawn)
        for row, own, each in zip(rows, known, guesses, strict=True):
            own.guess = len(row.tokens), each
        return guesses

    def _known(self, row: DraftRow) -> Known:
        known: Known = row.state
        if known.guess is not None and known.guess[0] < len(row.tokens):
            place, guesses = known.guess
            self.judged.add(guesses, row.tokens[place])
        known.states.bound()
        return known

    def _take_in(self, rows: Sequence[DraftRow], known: Sequence[Known]) -> mx.array:
        """Show the head what it has not seen; the states (rows, hidden) after each last token."""
        sizes = [row.fresh for row in rows]
        tokens = [token for row in rows for token in row.tokens[-row.fresh :]]
        # a pair stands where its state does, one before its token
        places = [
            place
            for row in rows
            for place in range(len(row.tokens) - row.fresh - 1, len(row.tokens) - 1)
        ]
        hidden = mx.concatenate([row.hidden for row in rows if row.hidden is not None])
        after = self._pass(known, sizes, places, mx.array(tokens), hidden)
        return after[mx.array([end - 1 for end in accumulate(sizes)])]

    def _pass(
        self,
        known: Sequence[Known],
        sizes: Sequence[int],
        positions: Sequence[int],
        tokens: mx.array,
        hidden: mx.array,
    ) -> mx.array:
        states = States([each.states for each in known], sizes, positions)
        return self.head.after(tokens, hidden, states)


def _by_row(rows: int, drawn: list[tuple[list[int], mx.array]]) -> list[DeviceTokens]:
    """The guesses of all rounds, row by row."""
    flat = mx.concatenate([tokens for _, tokens in drawn])
    places: list[list[int]] = [[] for _ in range(rows)]
    for place, which in enumerate(which for at, _ in drawn for which in at):
        places[which].append(place)
    return [DeviceTokens(flat[mx.array(own)]) for own in places]
