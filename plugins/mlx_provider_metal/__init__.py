"""A kernel for Metal: attention of many rows to one prefix. It has never run on a Mac."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_provider import Kernels, Replacement, hookimpl

mlx_provider_api = 1


def matches(device: str, precision: str) -> bool:
    """Any model on Metal."""
    return device == "metal"


def replacements() -> Iterable[Replacement]:
    """The kernel. It stays out if a trial on this device does not find it correct and faster."""
    from .prefix import REPLACEMENTS

    return REPLACEMENTS


@hookimpl
def mlx_kernels() -> Iterable[Kernels]:
    serves = "on Metal, where a trial finds it correct and faster: attention to shared prefixes"
    yield Kernels("metal", matches, replacements, serves=serves)
