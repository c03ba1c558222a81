"""Draws the next tokens of rows, with the masks of their grammars."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..execution.decode_batch import NO_DRAFTS, Drafts
from ..execution.sampler import Drawn, draw
from ..request import Row
from ..speculation.ahead import Mask, ahead
from ..speculation.step import Place
from .commit import Commit
from .state import State


class Draws:
    """Every method belongs to the engine thread."""

    def __init__(self, state: State, commit: Commit) -> None:
        self._state = state
        self._commit = commit

    def launch(self, places: Sequence[Place], logits: mx.array, drafts: Drafts) -> None:
        """Draw after every place from logits (B, vocab), and give the rows their tokens."""
        rows, batch = [row for row, _ in places], self._state.batch
        masks = [self._mask(row, at, drafts) for row, at in places]
        if self._state.fixed is None:
            drawn = [ahead(row, drafts.get(row, ()), at) for row, at in places]
            batch.drawn(rows, draw(logits, drawn, masks), drafts)
            return
        for i, row in enumerate(rows):
            batch.drawn([row], draw(logits[i : i + 1], [row], masks[i : i + 1]))

    def one(self, row: Row, logits: mx.array) -> Drawn:
        """The next token of one row, from logits (vocab,). If drawing fails, an arbitrary token."""
        mask = self._mask(row, 0)
        with self._commit.fails_next(row, "its sampling"):
            drawn = draw(logits[None], [row], [mask])
            mx.async_eval(drawn.arrays)  # type: ignore[no-untyped-call]
            return drawn
        return Drawn(mx.zeros(1, mx.int32), None)

    def _mask(self, row: Row, at: int, drafts: Drafts = NO_DRAFTS) -> Mask | None:
        """The grammar's mask after `at` of the row's drafts."""
        if row.constraint is None:
            return None
        if row in drafts:
            return row.masks[at]  # type: ignore[no-any-return]
        with self._commit.fails_next(row, "its grammar"):
            return row.constraint.mask()
        return None


def only(
    wanted: Sequence[bool], places: Sequence[Place], logits: mx.array
) -> tuple[Sequence[Place], mx.array]:
    """Some of the places, and their logits (B, vocab)."""
    if all(wanted):
        return places, logits
    at = [i for i, ok in enumerate(wanted) if ok]
    return [places[i] for i in at], logits[mx.array(at)] if at else logits[:0]
