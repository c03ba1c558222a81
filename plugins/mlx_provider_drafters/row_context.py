"""What a draft model has read of one row, in a cache that takes back what did not hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_provider.families.caches import KVCache, RotatingKVCache

LONGEST = 4096
"""Tokens of a row that are read at most: what comes next mostly follows from the last ones, and
neither the memory of a draft model nor the time until it drafts grows with a prompt."""
MIN_WINDOW_TOKENS = 256
"""Of a window that is worth it."""
AHEAD = 8
"""Tokens that one call adds: a row's new one and its drafts."""


def longest(cache: Sequence[Any]) -> int:
    """Tokens up to which the last ones can be taken back from every layer; 0: from some never.

    A window gives them back until it has wrapped (mlx_lm/models/cache.py 0.32.2).
    """
    kinds = {type(layer) for layer in cache}
    windows = [layer.max_size for layer in cache if isinstance(layer, RotatingKVCache)]
    least = min([LONGEST, *windows])
    return least if kinds <= {KVCache, RotatingKVCache} and least >= MIN_WINDOW_TOKENS else 0


class RowContext:
    """A part of a row up to its end, read so far as `known` tells."""

    def __init__(self, cache: list[Any]) -> None:
        self.cache = cache
        self.begin = 0
        """Among the row's tokens, of the first one that the cache holds."""
        self.known = 0
        """Tokens of the row, from its first on, that need not be read."""
        self.guessed: Sequence[int] = ()
        """Tokens in the cache behind those."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Keep of the guesses those that are the row's; its last token is to be read (again)."""
        new = tokens[self.known : self.known + len(self.guessed)]
        pairs = enumerate(zip(self.guessed, new, strict=False))
        held = next((i for i, (guess, token) in pairs if guess != token), len(new))
        stay = min(self.known + held, len(tokens) - 1)
        wrong = self.known + len(self.guessed) - stay
        for layer in self.cache:
            layer.trim(wrong)
        self.known, self.guessed = stay, ()

    def start_again(self, cache: list[Any], begin: int) -> None:
        """Read the row from a later token on."""
        self.cache, self.begin, self.known, self.guessed = cache, begin, begin, ()
