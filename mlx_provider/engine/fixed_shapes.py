"""Pass shapes of a reproducible model, independent of other requests. Imports no mlx.

The shapes of arrays choose the kernels, and each kernel rounds differently. So each pass that
decodes has the same number of rows, with padding and with separate keys per row, and each prompt
pass the same number of tokens, counted from the beginning of the prompt, so that a stored prefix
equals a computed one.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 8
"""Rows of a decode pass: a GPU reads the weights for this many in little more time than for one."""
TOKENS = 256
"""Tokens of a prompt pass: enough for the best rate of most devices. Stored prefixes are cut to a
multiple of it, and other requests wait for one such pass."""


@dataclass(frozen=True)
class FixedShapes:
    """Sizes of all passes except the last pass of a prompt."""

    rows: int
    tokens: int

    @classmethod
    def within(cls, max_rows: int, max_chunk: int) -> FixedShapes:
        return cls(min(ROWS, max_rows), min(TOKENS, max_chunk))

    def whole(self, tokens: int) -> int:
        """Tokens among the first `tokens` that whole passes have computed."""
        return tokens // self.tokens * self.tokens

    def size(self, done: int, total: int) -> int:
        """Tokens of the pass after the first `done` tokens of a prompt."""
        return min(self.whole(done) + self.tokens, total) - done
