"""Searches megabytes of text in slices, because one call of `re` blocks all other threads."""

from __future__ import annotations

import re
from collections.abc import Iterator

SLICE = 2**18
"""Characters that are searched in a few milliseconds."""


def starts(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[int]:
    """Ascending start positions of matches, for a pattern that reads at most `longest` characters.
    A match across the end of a slice may be found twice or hide one that begins within it. Exact
    for patterns that consume nothing, and for whether there is a match at all."""
    for begin in range(0, len(text), SLICE):
        end = begin + SLICE
        for match in pattern.finditer(text, begin, end + longest - 1):
            if match.start() < end:
                yield match.start()
