"""Draws the next tokens of rows, behind the masks of their grammars."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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

    def launch(
        self,
        places: Sequence[Place],
        logits: mx.array,
        masks: Sequence[Mask | None],
        drafts: Drafts,
    ) -> None:
        """Draw after every place from logits (B, vocab), and let the rows have their tokens."""
        rows, batch = [row for row, _ in places], self._state.batch
        if self._state.fixed is None:
            drawn = [ahead(row, drafts.get(row, ())[:at]) for row, at in places]
            batch.drawn(rows, self._drawn(logits, drawn, masks), drafts)
            return
        for i, row in enumerate(rows):
            batch.drawn([row], self._drawn(logits[i : i + 1], [row], masks[i : i + 1]))

    def one(self, row: Row, logits: mx.array) -> Drawn | None:
        """The next token of one row, from logits (vocab,); `None`: its request has failed."""
        masks, ready = self.masks([(row, 0)])
        if not ready[0]:
            return None
        with self._commit.isolated(row.request, "its sampling") as work:
            drawn = self._drawn(logits[None], [row], masks)
            mx.async_eval(drawn.arrays)  # type: ignore[no-untyped-call]
        return drawn if self._state.decisions.was_drawn(work.fault is None) else None

    def masks(
        self, places: Sequence[Place], drafts: Drafts = NO_DRAFTS
    ) -> tuple[list[Mask | None], list[bool]]:
        """Grammar masks, and whose rows go on. A grammar that fails ends its request alone."""
        masks: list[Mask | None] = [None] * len(places)
        if any(row.constraint is not None for row, _ in places):
            own = partial(self._own_masks, places, drafts)
            masks = self._state.decisions.masks(own, masks)
        return masks, [row.finish is None for row, _ in places]

    def _own_masks(self, places: Sequence[Place], drafts: Drafts) -> list[Mask | None]:
        masks: list[Mask | None] = []
        for row, at in places:
            mask = None
            if row.finish is None and row.constraint is not None and row in drafts:
                mask = row.masks[at]
            elif row.finish is None and row.constraint is not None:
                with self._commit.isolated(row.request, "its grammar"):
                    mask = row.constraint.mask()
            masks.append(mask)
        return masks

    def _drawn(self, logits: mx.array, rows: Sequence[Row], masks: Sequence[Mask | None]) -> Drawn:
        """The next token of each row, from logits (B, vocab)."""
        return self._state.decisions.draw(logits, partial(draw, logits, rows, masks))


def only(
    wanted: Sequence[bool], places: Sequence[Place], logits: mx.array
) -> tuple[Sequence[Place], mx.array]:
    """Some of the places, and their logits (B, vocab)."""
    if all(wanted):
        return places, logits
    at = [i for i, ok in enumerate(wanted) if ok]
    return [places[i] for i in at], logits[mx.array(at)] if at else logits[:0]
