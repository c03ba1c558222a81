"""Long texts: cut where a tokenizer separates them itself, so that the tokens do not change.

To encode megabytes of text at once takes about a hundred times its size in memory, and blocks all
other users of the tokenizer; one call of `re` blocks all other threads. Valid for tokenizers 0.23.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ...errors import ContextTooLong

SLICE = 2**18
"""Characters that are searched in a few milliseconds."""


def starts(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[int]:
    """Ascending start positions of matches, which may overlap, for a pattern that reads at most
    `longest` characters."""
    for begin in range(0, len(text), SLICE):
        at, end = begin, begin + SLICE
        while at < end and (match := pattern.search(text, at, end + longest - 1)):
            if (at := match.start() + 1) <= end:
                yield match.start()


PIECE = 2**15
NEAR = 256
"""Characters on either side of a cut that are examined."""
TRIES = 16
"""Positions tried for one cut before the piece is extended."""
UNDIVIDED = 2**20
"""Characters of the longest piece. Its encoding takes some hundred MB."""

# Word ends in most texts: between a letter and a non-letter, a space and a non-space.
_PLACES = re.compile(
    r"(?<=[^\W\d_])(?=[\W\d_])|(?<=[\W\d_])(?=[^\W\d_])|(?<=\S)(?=\s)|(?<=\s)(?=\S)"
)


Encode = Callable[[str], list[int]]


def pieces(text: str, encode: Encode) -> Iterator[tuple[int, str]]:
    """The text in pieces, with the start of each. Raises `ContextTooLong` without a cut.

    A cut is made where the `NEAR` characters on either side have the same tokens together and
    apart."""
    start = 0
    while len(text) - start > PIECE and (end := _cut(text, start, encode)):
        yield start, text[start:end]
        start = end
    yield start, text[start:]


def _cut(text: str, start: int, encode: Encode) -> int | None:
    """`None`: the piece that begins at `start` is the last."""
    for first in range(start + PIECE // 2, min(len(text), start + UNDIVIDED), PIECE):
        for tried, place in enumerate(_PLACES.finditer(text, first, first + PIECE)):
            at = place.start()
            left, right = text[max(0, at - NEAR) : at], text[at : at + NEAR]
            if right and encode(left) + encode(right) == encode(left + right):
                return at
            if tried >= TRIES:
                break
    if len(text) - start > UNDIVIDED:
        raise ContextTooLong(
            f"the prompt has {UNDIVIDED} characters that cannot be divided for this model's "
            "tokenizer: shorten it, or break its words",
            param="messages",
        )
    return None
