"""Kernels: functions that are faster on one kind of device than those of the models.

If rows of different lengths decode in one call, the keys and values of a routed
`scaled_dot_product_attention` are `Parts`, one pair of arrays for each cache. `parts_of` reads
them; plain arrays are one part for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class UpstreamPatch:
    """A function or method of upstream that a plugin replaces."""

    target: str
    """Its full name: `mlx_lm.models.base.scaled_dot_product_attention`."""
    version: str
    """The distribution and version of the source that was read: `mlx-lm 0.32.2`."""
    reason: str
    """One line for people: what upstream does, and what the replacement does."""


Function = Callable[..., Any]


@dataclass(frozen=True)
class Replacement:
    """A function that upstream's models call, and its replacement."""

    module: str
    """The module that defines it; functions of the same name from other modules stay."""
    name: str
    """A function of that module, or `Class.method` of it with `at_home`."""
    make: Callable[[Function], Function]
    """(original) -> a function with the same arguments and result, up to rounding.

    It calls the original for everything else: other dtypes, quantised keys, arrays that are too
    small. The keys of an attention may be `Parts`, see `parts_of`. If it returns the
    original, nothing is replaced.
    """
    at_home: bool = False
    """Its callers are in the module that defines it, not in those of a model's layers."""
    tolerance: float = 1e-4
    """Largest difference from the original in float32, as a share of the largest value; tests
    of the plugin check it."""


@dataclass(frozen=True)
class Kernels:
    """Replacements for one kind of device. One of those that match is chosen for a loaded model."""

    name: str
    matches: Callable[[str, str], bool]
    """(device, precision) -> whether they are made for it; asked when a model is loaded.

    `device` is `cpu`, `metal` or `cuda`; `precision` is the model's `ModelInfo.precision`.
    """
    replacements: Callable[[], Iterable[Replacement]]
    """Called only if these are chosen: import here what they need, not with the plugin."""
    rank: int = 0
    """The match with the highest rank is taken."""
    serves: str = ""
    """One line for people."""
    patches: tuple[UpstreamPatch, ...] = ()
    """One for each replacement, with the reason."""


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
