"""The tokens of a row and its drafts, as if these were accepted: what the sampler and the grammar
see. Text that a grammar forces, or that is likely in a call."""

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
"""A row, and the number of its drafts before a position."""


class DraftedTokens(Sequence[int]):
    """The tokens of a row, then the first `count` of its drafts. Drafts on the device are read only
    when asked for."""

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
    """For one draw. `row` does not change."""
    if not count:
        return row
    twin = copy.copy(row)
    twin.tokens = DraftedTokens(row.tokens, drafts, count)  # type: ignore[assignment]
    twin.history = copy.copy(row.history)
    return twin


def draft_masks(constraint: RowConstraint, drafts: Sequence[int]) -> list[Mask | None]:
    """Masks before each draft and after the last one, up to the first draft that the grammar
    rejects. Raises the errors of the constraint."""
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
    """One position for each row and one for each of its drafts."""
    seen: dict[Row, int] = {}
    for row in rows:
        at = seen[row] = seen.get(row, -1) + 1
        yield row, at


def after_run(run: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
    """The forced run, and the rest of a guess that begins with it."""
    return guess if list(guess[: len(run)]) == list(run) else run


def known_run(row: Row) -> tuple[Sequence[int], int]:
    """Tokens after the last committed one: those that the grammar forces, then those that the
    predictor predicts; and the number of the former."""
    left = max(0, min(MOST_DRAFTS + 1, row.request.max_tokens - len(row.tokens) - 1))
    found = () if row.constraint is None else attempt(row.constraint.forced_tokens)
    # a grammar that fails reports it with its next mask
    forced = () if isinstance(found, Fault) else found[:left]
    return after_run(forced, predict(row)[:left]), len(forced)


def predict(row: Row, token: int | None = None) -> Sequence[int]:
    """What its predictor expects before it gets the next `token`. One that fails is dropped."""
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
    """The drafts that the row's grammar allows, with `Row.masks`. If it fails, there are none, and
    its request ends with the next token."""
    if row.constraint is None:
        return drafts
    found = attempt(partial(draft_masks, row.constraint, drafts))
    if not isinstance(found, Fault):
        row.masks = found
        return drafts[: len(found) - 1]
    found.log(f"request {row.request.id}: its grammar")
    row.error, row.masks = found.of_request("its grammar"), []
    return ()
