"""Attention over caches that stay apart: what a routed `scaled_dot_product_attention` is given.

Where rows of unlike lengths decode in one call, its keys and values are `Parts`, one pair of
arrays for each cache; `parts_of` reads them, and plain arrays as one part for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Run:
    """Rows of one cache among all rows of a call."""

    cache: Any
    rows: slice
    turned: bool = False
    """They are one row's tokens, which stand where others have rows."""


class Parts(list[Any]):
    """Keys or values of several caches, in row order, and whose they are."""

    def __init__(self, arrays: list[Any], runs: list[Run], *, apart: bool = False) -> None:
        """`apart`: how one part is computed must not depend on the others that are there."""
        super().__init__(arrays)
        self.runs = runs
        self.apart = apart


class Part(NamedTuple):
    """Rows of a call's queries, and what they attend to."""

    keys: Any
    """(B, Hk, S, D)"""
    values: Any
    """(B, Hk, S, Dv)"""
    mask: Any
    """`None`, `"causal"`, or an array that broadcasts to (B, H, L, S): bool (may see) or float
    (added)."""
    rows: slice = slice(None)
    turned: bool = False
    """One row's tokens stand where others have rows."""

    def of(self, x: Any) -> Any:
        """Its rows of (rows, H, L, D), as (B, H, L, D)."""
        return x[self.rows].swapaxes(0, 2) if self.turned else x[self.rows]


def parts_of(keys: Any, values: Any, mask: Any) -> list[Part]:
    """What the rows of a call attend to; `mask`: one for each part, or one for all."""
    if not isinstance(keys, Parts):
        return [Part(keys, values, mask)]
    masks = mask if isinstance(mask, list) else [mask] * len(keys)
    return [
        Part(k, v, own, run.rows, run.turned)
        for k, v, own, run in zip(keys, values, masks, keys.runs, strict=True)
    ]
