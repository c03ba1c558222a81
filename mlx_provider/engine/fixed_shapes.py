"""What the passes of a reproducible model look like, whoever else is there. Imports no mlx.

Kernels are chosen by the shapes of their arrays, and another one rounds otherwise. A request gives
the same bits in any company where its passes have the same shapes in any: those that decode so
many rows, the missing ones filled up, each row's keys by themselves; those of a prompt so many
tokens, counted from its beginning, so that what is stored of it is what would be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 8
"""Of a pass that decodes: a GPU reads the weights for so many in little more time than for one, and
a further pass for those beyond."""
TOKENS = 256
"""Of a pass of a prompt: enough for the best rate of most devices. It is what a stored prefix is
cut to, and what others wait for."""


@dataclass(frozen=True)
class FixedShapes:
    """Sizes of all passes but the last of a prompt."""

    rows: int
    tokens: int

    @classmethod
    def within(cls, max_rows: int, max_chunk: int) -> FixedShapes:
        """The usual ones, or what is allowed."""
        return cls(min(ROWS, max_rows), min(TOKENS, max_chunk))

    def whole(self, tokens: int) -> int:
        """Those of so many first tokens that whole passes have computed."""
        return tokens // self.tokens * self.tokens

    def size(self, done: int, total: int) -> int:
        """Tokens of the pass after the first `done` of a prompt."""
        return min(self.whole(done) + self.tokens, total) - done
