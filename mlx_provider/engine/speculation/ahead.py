"""A row as if its drafts were accepted, for the sampler and the grammar."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..request import Row, RowConstraint

Mask = NDArray[np.uint32]


def ahead(row: Row, drafts: Sequence[int]) -> Row:
    """A copy of `row` with these tokens, for one draw. `row` does not change."""
    if not drafts:
        return row
    twin = copy.copy(row)
    twin.tokens = [*row.tokens, *drafts]
    twin.history = copy.copy(row.history)
    return twin


def masks_ahead(constraint: RowConstraint, drafts: Sequence[int]) -> list[Mask | None]:
    """Masks before each draft and after the last one, up to the first draft that the grammar
    rejects.

    Raises the errors of the constraint.
    """
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
    """Whether the mask allows the token."""
    return mask is None or bool(mask[token // 32] >> np.uint32(token % 32) & 1)
