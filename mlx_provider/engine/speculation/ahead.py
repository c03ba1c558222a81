"""A row as it will be if its drafts hold: what the sampler and the grammar need to know of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..request import Row, RowConstraint

Mask = NDArray[np.uint32]


def ahead(row: Row, drafts: Sequence[int]) -> Row:
    """A twin that has these tokens, for one draw; `row` itself is not changed."""
    if not drafts:
        return row
    twin = copy.copy(row)
    twin.tokens = [*row.tokens, *drafts]
    twin.history = copy.copy(row.history)
    return twin


def masks_ahead(constraint: RowConstraint, drafts: Sequence[int]) -> list[Mask | None]:
    """Masks before each draft and after the last, as far as the grammar lets drafts through.

    Raises what the constraint raises.
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
    """Whether a token may follow."""
    return mask is None or bool(mask[token // 32] >> np.uint32(token % 32) & 1)
