"""Reads a user's settings of a client, which may have any shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def mapping(content: Any, *names: str) -> Mapping[str, Any]:
    """The mapping below these names; empty if there is none."""
    for name in names:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content if isinstance(content, Mapping) else {}


def each(content: Any) -> list[Mapping[str, Any]]:
    found = content.values() if isinstance(content, Mapping) else content
    listed = found if isinstance(content, (list, Mapping)) else []
    return [one for one in listed if isinstance(one, Mapping)]


def count(found: Any) -> int | None:
    return found if isinstance(found, int) and found > 0 else None


def least(found: Iterable[Any]) -> int | None:
    return min((number for one in found if (number := count(one))), default=None)
