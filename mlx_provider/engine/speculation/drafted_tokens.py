"""The tokens of a row and its drafts as the sampler and the grammar see them, as if the drafts were
accepted. Also drafts without a drafter: text that a grammar forces, or that a predictor expects."""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...isolation import Fault, attempt
from ...records.extensions import MOST_DRAFTS
from ..request import Row, RowConstraint

Mask = NDArray[np.uint32]
Place = tuple[Row, int]
"""A position of a row in a pass: the row, and how many of its drafts are before the position."""


class DraftedTokens(Sequence[int]):
    """A row's tokens, then its first `count` drafts, which are read from the device if needed."""

    def __init__(self, tokens: Sequence[int], drafts: Sequence[int], count: int) -> None:
        self._tokens, self._drafts, self._count = tokens, drafts, count

    def __len__(self) -> int:
        return len(self._tokens) + self._count

    def __getitem__(self, at: Any) -> Any:
        places = range(len(self))[at]
        return [*map(self._at, places)] if isinstance(places, range) else self._at(places)

    def _at(self, place: int) -> int:
        known = len(self._tokens)
        return self._tokens[place] if place < known else self._drafts[place - known]


def row_with_drafts(row: Row, drafts: Sequence[int], count: int) -> Row:
    """A copy of the row for one draw, with its first `count` drafts as tokens. 0: `row` itself."""
    if not count:
        return row
    twin = copy.copy(row)
    twin.tokens = DraftedTokens(row.tokens, drafts, count)  # type: ignore[assignment]
    twin.history = copy.copy(row.history)
    return twin


def draft_masks(constraint: RowConstraint, drafts: Sequence[int]) -> list[Mask | None]:
    """Masks before each draft and after the last one. They end at a draft that the grammar rejects
    or ends with, and after the first mask if there is no fork. Raises the grammar's errors."""
    masks = [constraint.mask()]
    later = constraint.fork() if drafts else None
    for token in drafts:
        if later is None or not allows(masks[-1], token):
            break
        later.advance(token)
        if later.finished:
            break
        masks.append(later.mask())
    return masks


def allows(mask: Mask | None, token: int) -> bool:
    return mask is None or bool(mask[token // 32] >> np.uint32(token % 32) & 1)


def places(rows: Sequence[Row]) -> Iterator[Place]:
    """The position of each entry of `rows`, where a row appears once, then once per draft."""
    seen: dict[Row, int] = {}
    for row in rows:
        at = seen[row] = seen.get(row, -1) + 1
        yield row, at


def after_run(run: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
    """The guess if it begins with the known run, else the run."""
    return guess if list(guess[: len(run)]) == list(run) else run


def known_run(row: Row) -> tuple[Sequence[int], int]:
    """The tokens that are expected after the last committed one, and how many of them the grammar
    forces. The others are from the predictor. Never raises."""
    left = max(0, min(MOST_DRAFTS + 1, row.request.max_tokens - len(row.tokens) - 1))
    found = () if row.constraint is None else attempt(row.constraint.forced_tokens)
    # a grammar that fails here fails again at its next mask, which reports the fault
    forced = () if isinstance(found, Fault) else found[:left]
    return after_run(forced, predict(row)[:left]), len(forced)


def predict(row: Row, token: int | None = None) -> Sequence[int]:
    """The tokens that the row's predictor expects. After that, it gets the next `token`, if any. A
    predictor that fails is dropped."""
    predictor = row.predictor
    if predictor is None:
        return ()

    def ask() -> Sequence[int]:
        likely = predictor.likely()
        if token is not None:
            predictor.advance(token)
        return likely

    found = attempt(ask)
    if not isinstance(found, Fault):
        return found
    found.log(f"request {row.request.id}: its predictor of call text")
    row.predictor = None
    return ()


def let_through(row: Row, drafts: Sequence[int]) -> Sequence[int]:
    """The leading drafts that the row's grammar allows. Sets `Row.masks`. If the grammar fails,
    there are no drafts, and `Row.error` ends the request with the next token."""
    if row.constraint is None:
        return drafts
    found = attempt(partial(draft_masks, row.constraint, drafts))
    if not isinstance(found, Fault):
        row.masks = found
        return drafts[: len(found) - 1]
    found.log(f"request {row.request.id}: its grammar")
    row.error, row.masks = found.of_request("its grammar"), []
    return ()
