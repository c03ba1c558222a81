"""Kernels: functions that compute faster on one kind of device than those that models call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .upstream import UpstreamPatch

Function = Callable[..., Any]


@dataclass(frozen=True)
class Replacement:
    """One function that upstream's models call, and what takes its place."""

    module: str
    """The module that defines it; a function of the same name from elsewhere is left alone."""
    name: str
    make: Callable[[Function], Function]
    """(the original) -> a function of the same arguments and result, up to rounding.

    It hands on to the original whatever it is not made for: other dtypes, quantised keys, arrays
    too small to be worth it. An attention's keys may be `Parts`, see `records.attention`.
    """
    at_home: bool = False
    """Callers stand in the module that defines it, not in those of a model's layers."""
    tolerance: float = 1e-4
    """Largest difference of a value of float32 from the original's, as a share of the largest of
    these; what `pytest --mlx-conformance` holds it to."""


@dataclass(frozen=True)
class Kernels:
    """Replacements for one kind of device. Of all that match, one is chosen for a loaded model."""

    name: str
    matches: Callable[[str, str], bool]
    """(device, precision) -> whether these are made for it; asked whenever a model is loaded.

    `device` is `cpu`, `metal` or `cuda`; `precision` is the model's `ModelInfo.precision`.
    """
    replacements: Callable[[], Iterable[Replacement]]
    """Asked only where these are chosen: what they need is imported here, not with the plugin."""
    rank: int = 0
    """Of several that match, those with the highest rank are taken."""
    serves: str = ""
    """One line for people: what becomes faster where."""
    patches: tuple[UpstreamPatch, ...] = ()
    """What `replacements` replace, one for each, with the reason."""
