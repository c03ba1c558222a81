"""Numbers and texts that the profiles share.

Reads a user's settings of a client, which may have any shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KEY = "MLX_GATEWAY_KEY"
"""Variable with the gateway's key, for clients whose files name a variable."""
SUBAGENT = "local"
SUBAGENT_TASKS = (
    "Searches and small edits at no cost, on a local model. Use it to find files and code, to read "
    "and summarise files, and for mechanical edits that are described exactly."
)
SUBAGENT_PROMPT = (
    "You do one small task in a code base for another agent: a search, a summary or an exact edit. "
    "Read only what the task needs. Reply with the result alone: paths, line numbers, and what you "
    "changed."
)
REPLY_SECONDS = 3600
"""Seconds without a token: a prompt of 100,000 tokens may take as long."""


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
