"""Which entry points are loaded, and in what order."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from ..hookspecs import PROJECT
from .plugin import FIRST_PARTY, Plugin

SELECTION = "MLX_PROVIDER_PLUGINS"
"""Unset: every installed plugin; empty: none; else a comma-separated list of names."""


def installed() -> list[tuple[Plugin, EntryPoint]]:
    """Every installed plugin, not yet loaded: ours first, then by distribution and name."""
    found = [(_unloaded(entry_point), entry_point) for entry_point in entry_points(group=PROJECT)]
    return sorted(found, key=lambda pair: (not pair[0].ours, pair[0].distribution, pair[0].name))


def selection(environ: Mapping[str, str]) -> frozenset[str] | None:
    """The names that `MLX_PROVIDER_PLUGINS` asks for; `None`: all."""
    given = environ.get(SELECTION)
    if given is None:
        return None
    return frozenset(name.strip() for name in given.split(",") if name.strip())


def missing(name: str) -> Plugin:
    """Stands in the list for a name that `MLX_PROVIDER_PLUGINS` asks for in vain."""
    return Plugin(name, "", "", error=f"{SELECTION} names it, but no such plugin is installed")


def _unloaded(entry_point: EntryPoint) -> Plugin:
    dist = entry_point.dist
    if dist is None:
        return Plugin(entry_point.name, "", "")
    distribution = dist.name.lower().replace("_", "-").replace(".", "-")
    ours = distribution == FIRST_PARTY
    return Plugin(entry_point.name, FIRST_PARTY if ours else dist.name, dist.version)
