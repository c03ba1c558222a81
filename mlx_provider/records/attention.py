"""Attention over separate caches: the arguments of a routed `scaled_dot_product_attention`.

If rows of different lengths decode in one call, keys and values are `Parts`, one pair of arrays for
each cache. `parts_of` reads them; plain arrays are one part for all rows.
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
    """The tokens of one row are on the axis of the rows."""


class Parts(list[Any]):
    """Keys or values of several caches, in the order of their rows."""

    def __init__(self, arrays: list[Any], runs: list[Run], *, apart: bool = False) -> None:
        """`apart`: the other parts must not change how one part is computed."""
        super().__init__(arrays)
        self.runs = runs
        self.apart = apart


class Part(NamedTuple):
    """Rows of a call's queries, with their keys and values."""

    keys: Any
    """(B, Hk, S, D)"""
    values: Any
    """(B, Hk, S, Dv)"""
    mask: Any
    """`None`, `"causal"`, or an array that broadcasts to (B, H, L, S): bool (may see) or float
    (added)."""
    rows: slice = slice(None)
    turned: bool = False
    """The tokens of one row are on the axis of the rows."""

    def of(self, x: Any) -> Any:
        """Its rows of (rows, H, L, D), as (B, H, L, D)."""
        return x[self.rows].swapaxes(0, 2) if self.turned else x[self.rows]


def parts_of(keys: Any, values: Any, mask: Any) -> list[Part]:
    """The parts of a call. `mask`: one for each part, or one for all."""
    if not isinstance(keys, Parts):
        return [Part(keys, values, mask)]
    masks = mask if isinstance(mask, list) else [mask] * len(keys)
    return [
        Part(k, v, own, run.rows, run.turned)
        for k, v, own, run in zip(keys, values, masks, keys.runs, strict=True)
    ]
