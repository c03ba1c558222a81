"""Kernels: functions that are faster on one kind of device than those of the models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .upstream import UpstreamPatch

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
    small. The keys of an attention may be `Parts`, see `records.attention`. If it returns the
    original, nothing is replaced.
    """
    at_home: bool = False
    """Its callers are in the module that defines it, not in those of a model's layers."""
    tolerance: float = 1e-4
    """Largest difference from the original in float32, as a share of the largest value; `pytest
    --mlx-conformance` checks it."""


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
