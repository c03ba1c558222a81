"""Ends of turns that a model writes as text after its calls."""

from __future__ import annotations

from collections.abc import Sequence

from .reading import Reading, TextReader, ends_within


def read_turn_ends(
    reader: TextReader, ends: Sequence[str], openers: Sequence[str], markers: Sequence[str] = ()
) -> Reading[str]:
    """Read `ends` of turns directly after a call; elsewhere they are text.

    An opener that begins like one of them stays. If the reply is cut inside one of all these texts,
    that piece is dropped. Returns the white space before the next text.
    """
    while True:
        space = yield from reader.space()
        found = yield from reader.at(*ends, *openers, *markers)
        if ends_within(reader, (*ends, *openers, *markers)):
            reader.skip(len(reader.ahead()))
            return ""
        if found not in ends or found in openers:
            return space
        reader.skip(len(found))
