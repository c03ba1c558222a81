"""What drafters are asked for in one step. Imports no mlx."""

from __future__ import annotations

from typing import NamedTuple


class Ask(NamedTuple):
    source: int
    drafts: int


Asks = tuple[Ask, ...]
"""The drafters of a row in one step. The next one is asked if the one before has no guess."""


def within(asks: Asks, most: int) -> Asks:
    return tuple(Ask(ask.source, min(ask.drafts, most)) for ask in asks) if most > 0 else ()
