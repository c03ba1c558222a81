"""Selects the entry points to load, and their order."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import Distribution, EntryPoint, entry_points

from ..hookspecs import PROJECT
from .plugin import FIRST_PARTY, Plugin

SELECTION = "MLX_PROVIDER_PLUGINS"
"""Unset: every installed plugin. Empty: none. Else a comma-separated list of names."""


def installed() -> list[tuple[Plugin, EntryPoint]]:
    """Installed plugins, not loaded yet: built-in ones first, then by distribution and name."""
    points = list(entry_points(group=PROJECT))
    known = {id(point.dist): _distribution(point.dist) for point in points}
    found = [(Plugin(point.name, *known[id(point.dist)]), point) for point in points]
    return sorted(found, key=lambda pair: (not pair[0].ours, pair[0].distribution, pair[0].name))


def selection(environ: Mapping[str, str]) -> frozenset[str] | None:
    given = environ.get(SELECTION)
    if given is None:
        return None
    return frozenset(name.strip() for name in given.split(",") if name.strip())


def missing(name: str) -> Plugin:
    return Plugin(name, "", "", error=f"{SELECTION} names it, but no such plugin is installed")


def _distribution(dist: Distribution | None) -> tuple[str, str]:
    """Name and version. Each access to one of them reads the metadata again."""
    if dist is None:
        return "", ""
    metadata = dist.metadata
    name, version = metadata["Name"], metadata["Version"]
    canonical = name.lower().replace("_", "-").replace(".", "-")
    return FIRST_PARTY if canonical == FIRST_PARTY else name, version
