"""The tokens of one row that a draft model has read, in a cache that can remove rejected ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_provider.families.caches import KVCache, RotatingKVCache
from mlx_provider.records import Unread

LONGEST = 4096
"""Last tokens of a row that are read, so that memory and time to the first draft do not grow with a
prompt."""
MIN_WINDOW_TOKENS = 256
AHEAD = 8
"""Tokens that one call adds: a row's new one and its drafts."""
MOST_ADDED = 2 * AHEAD
"""Includes the tokens of the last pass, accepted or not."""


def longest(cache: Sequence[Any]) -> int:
    """Length up to which the last tokens can be removed from every layer; 0: never. A window can
    remove tokens until it has wrapped (mlx_lm/models/cache.py 0.32.2)."""
    kinds = {type(layer) for layer in cache}
    windows = [layer.max_size for layer in cache if isinstance(layer, RotatingKVCache)]
    least = min([LONGEST, *windows])
    return least if kinds <= {KVCache, RotatingKVCache} and least >= MIN_WINDOW_TOKENS else 0


class RowContext:
    def __init__(self, cache: list[Any]) -> None:
        self.cache = cache
        self.begin = 0
        """Index in the row of the cache's first token."""
        self.known = 0
        """Tokens of the row, from its first on, that need no reading."""
        self.guessed: Sequence[int] = ()
        """Tokens in the cache after the known ones."""
        self.unread: Unread | None = None
        """The result whose tokens, accepted or not, follow in the cache."""

    @property
    def stale(self) -> mx.array | None:
        """Rejected tokens at the cache's end, (1,) int32; `None`: none."""
        if self.unread is None or self.unread.tokens.size == 1:
            return None
        return self.unread.tokens.size - 1 - self.unread.held

    def settle(self) -> None:
        """Keep the accepted ones of the unread tokens. Raises `ValueError` if their number is not
        known yet."""
        if self.unread is None:
            return
        if self.unread.read is None:
            raise ValueError("a row is asked for again before its result is read")
        self._take_back(self.unread.tokens.size - 1 - self.unread.read)
        self.known += self.unread.read + 1
        self.unread = None

    def follow(self, tokens: Sequence[int], unread: Unread | None) -> None:
        """Keep the accepted guesses. The row's last token must be read (again), unless `unread`
        ones follow it."""
        self.settle()
        new = tokens[self.known : self.known + len(self.guessed)]
        pairs = enumerate(zip(new, self.guessed, strict=False))
        held = next((i for i, (token, guess) in pairs if guess != token), len(new))
        stay = min(self.known + held, len(tokens) - (unread is None))
        self._take_back(self.known + len(self.guessed) - stay)
        self.known, self.guessed = stay, ()

    def guessed_behind(self, known: int, guesses: Sequence[int]) -> None:
        self.known, self.guessed = known, guesses
        if self.unread is not None:  # the number of accepted guesses is known too late
            self._take_back(len(guesses))
            self.guessed = ()

    def start_again(self, cache: list[Any], begin: int) -> None:
        self.cache, self.begin, self.known, self.guessed = cache, begin, begin, ()

    def _take_back(self, tokens: int) -> None:
        for layer in self.cache:
            layer.trim(tokens)
