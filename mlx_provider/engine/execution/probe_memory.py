"""Memory of the passes that try rows together at load."""

from __future__ import annotations

from ...records import LoadedModel
from ..memory import profile
from .deep_cache import MakeCache, Reserve
from .pass_memory import taken

ROWS = 15
"""Caches of the longest row that are in memory together, at most: of every row, its copies, and
copies that share a pass. A pass of fixed size has fewer rows."""
NO_ROOM = "too little memory is free to try them together"


def has_room(model: LoadedModel, make_cache: MakeCache, tokens: int, reserve: Reserve) -> bool:
    """Reserve the memory of a trial, if it is free. `tokens`: of its longest row."""
    one = taken(model, first := make_cache(), 0, 1)
    return reserve(ROWS * profile(first, 1).row_bytes(tokens) + one * tokens)
