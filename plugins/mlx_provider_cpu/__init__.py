"""Kernels for a CPU that MLX's build knows little of: any but Apple's."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from mlx_provider import Kernels, Replacement, hookimpl

mlx_provider_api = 1


def matches(device: str, precision: str) -> bool:
    """A CPU outside of macOS. Of whichever precision: each function looks at its arrays' dtype."""
    return device == "cpu" and sys.platform != "darwin"


def replacements() -> Iterable[Replacement]:
    """NumPy in place of what is slow there."""
    from .functions import REPLACEMENTS

    return REPLACEMENTS


@hookimpl
def mlx_kernels() -> Iterable[Kernels]:
    """One set, for float32."""
    serves = "on a CPU outside of macOS: attention, activations and gated delta rule of float32"
    yield Kernels("cpu", matches, replacements, serves=serves)
