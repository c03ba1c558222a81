"""Ends of turns that a model spells out as text behind its calls."""

from __future__ import annotations

from collections.abc import Sequence

from .reading import Reading, TextReader


def read_turn_ends(reader: TextReader, ends: Sequence[str], openers: Sequence[str]) -> Reading[str]:
    """Read `ends` of turns that directly follow a call; anywhere else they are text.

    An opener that begins like one of them is left alone. Returns the white space before what
    comes next.
    """
    while True:
        space = yield from reader.space()
        found = yield from reader.at(*ends, *openers)
        if not found or found in openers:
            return space
        reader.skip(len(found))
