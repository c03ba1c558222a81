"""Long texts: cut where a tokenizer separates them itself, so that the tokens do not change.

To encode megabytes of text at once takes about a hundred times its size in memory, and blocks all
other users of the tokenizer. Valid for tokenizers 0.23."""

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...errors import ContextTooLong

PIECE = 2**15
"""Characters of a text that is encoded at once. Longer ones are cut."""
NEAR = 256
"""Characters on either side of a cut that are examined."""
TRIES = 16
"""Positions tried for one cut before the piece is extended."""
UNDIVIDED = 2**20
"""Characters of the longest piece. Its encoding takes some hundred MB."""

# Word ends in most texts: between a letter and a non-letter, and beside white space.
_PLACES = re.compile(
    r"(?<=[^\W\d_])(?=[\W\d_])|(?<=[\W\d_])(?=[^\W\d_])|(?<=\S)(?=\s)|(?<=\s)(?=\S)"
)


class LongText:
    """Cuts long texts for a tokenizer, `fast`. Safe from any thread if `encode` is."""

    def __init__(self, fast: Any, encode: Callable[[str], list[int]]) -> None:
        self._fast = fast
        self._encode = encode

    def pieces(self, text: str) -> Iterator[tuple[int, str]]:
        """(start, piece) of each. Raises `ContextTooLong` if `UNDIVIDED` characters have no cut.

        A cut is made where the `NEAR` characters on either side give the same tokens together and
        apart. The pre-tokeniser must find the same words, too, or only one word together, whose two
        characters at the cut follow each other in no vocabulary entry. So no token changes, if the
        pre-tokeniser and added tokens look no further than `NEAR`."""
        start = 0
        while len(text) - start > PIECE:
            end = self._cut(text, start)
            if end is None:
                break
            yield start, text[start:end]
            start = end
        yield start, text[start:]

    def _cut(self, text: str, start: int) -> int | None:
        """`None`: the piece that begins at `start` is the last."""
        for first in range(start + PIECE // 2, min(len(text), start + UNDIVIDED), PIECE):
            for tried, place in enumerate(_PLACES.finditer(text, first, first + PIECE)):
                if self._splits(text, place.start()):
                    return place.start()
                if tried >= TRIES:
                    break
        if len(text) - start > UNDIVIDED:
            raise ContextTooLong(
                f"the prompt has {UNDIVIDED} characters that cannot be divided for this model's "
                "tokenizer: shorten it, or break its words",
                param="messages",
            )
        return None

    def _splits(self, text: str, at: int) -> bool:
        left, right = text[max(0, at - NEAR) : at], text[at : at + NEAR]
        if not right:
            return False
        words = self._words(left + right)
        if words != self._words(left) + self._words(right) and not self._never_joined(left, right):
            return False
        apart = self._encode(left) + self._encode(right)
        return apart == self._encode(left + right)

    def _words(self, text: str) -> list[str]:
        splitter = self._fast.pre_tokenizer
        if splitter is None:
            return [self._normal(text)]
        return [word for word, _ in splitter.pre_tokenize_str(self._normal(text))]

    def _normal(self, text: str) -> str:
        normaliser = self._fast.normalizer
        return text if normaliser is None else str(normaliser.normalize_str(text))

    def _never_joined(self, left: str, right: str) -> bool:
        """Whether both sides are one word in which the model joins nothing at the cut."""
        whole, before, after = map(self._normal, (left + right, left, right))
        if self._words(left + right) != [whole] or whole != before + after:
            return False
        return before[-1:] + after[:1] not in self._pairs

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """Every two characters that follow each other in an entry of the vocabulary."""
        entries = self._fast.get_vocab(with_added_tokens=False)
        return frozenset(a + b for entry in entries for a, b in pairwise(entry))
