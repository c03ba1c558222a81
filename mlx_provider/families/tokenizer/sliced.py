"""A search in a text of megabytes, in slices: one call of `re` lets no other thread run."""

from __future__ import annotations

import re
from collections.abc import Iterator

SLICE = 2**18
"""Characters that are searched in some milliseconds."""


def starts(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[int]:
    """Where matches begin, ascending, of a pattern that looks at `longest` characters at most.

    A match that crosses the end of a slice may be found twice or hide one that begins within it:
    exact for patterns that consume nothing, and for whether there is a match at all.
    """
    for begin in range(0, len(text), SLICE):
        end = begin + SLICE
        for match in pattern.finditer(text, begin, end + longest - 1):
            if match.start() < end:
                yield match.start()
