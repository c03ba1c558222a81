"""A row as if its drafts were accepted, for the sampler and the grammar."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ..request import Row, RowConstraint

Mask = NDArray[np.uint32]


class TokensAhead(Sequence[int]):
    """The tokens of a row, then the first `count` of its drafts. Drafts on the device are read only
    when asked for."""

    def __init__(self, tokens: Sequence[int], drafts: Sequence[int], count: int) -> None:
        self._tokens = tokens
        self._drafts = drafts
        self._count = count

    def __len__(self) -> int:
        return len(self._tokens) + self._count

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        places = range(len(self))[at]
        return [*map(self._at, places)] if isinstance(places, range) else self._at(places)

    def _at(self, place: int) -> int:
        known = len(self._tokens)
        return self._tokens[place] if place < known else self._drafts[place - known]


def ahead(row: Row, drafts: Sequence[int], count: int) -> Row:
    """For one draw. `row` does not change."""
    if not count:
        return row
    twin = copy.copy(row)
    twin.tokens = TokensAhead(row.tokens, drafts, count)  # type: ignore[assignment]
    twin.history = copy.copy(row.history)
    return twin


def masks_ahead(constraint: RowConstraint, drafts: Sequence[int]) -> list[Mask | None]:
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
