"""Sizes in tokens: of a row's cache, and of the passes of a reproducible model. Imports no mlx.

A row has capacity for the prompt and an output reserve, then for steps that a long reply seldom
needs. A growing buffer is copied, and MLX's pool reuses the freed one only for nearly the same size
(mlx 0.32, backend/metal/allocator.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

STEP_TOKENS = 256
"""Every capacity is a multiple of this (mlx_lm/models/cache.py 0.32.2, `KVCache.step`)."""
LEAST_GROWTH_TOKENS = 1024
"""Least growth of a row beyond its reserve, if its reply may become so long."""
GROWTH_SHARE = 8
"""A long row grows by this fraction (1/n) of its first capacity."""

ROWS = 8
"""Rows of a decode pass: a GPU reads the weights for this many in little more time than for one."""
TOKENS = 256
"""Tokens of a prompt pass: enough for the best rate of most devices. Stored prefixes are cut to a
multiple of it, and other requests wait for one such pass."""


def whole_steps(tokens: int) -> int:
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


def kv_growth(first: int, longest: int) -> int:
    """Growth of a row with first capacity `first`, which ends at `longest` tokens."""
    wanted = max(LEAST_GROWTH_TOKENS, first // GROWTH_SHARE)
    left = longest - whole_steps(first)  # the first capacity is allocated in whole steps
    return whole_steps(max(1, min(wanted, left)))


def kv_capacity(first: int, longest: int, needed: int, held: int = 0) -> int:
    """`held`: what the row's buffers had when it began."""
    if needed <= first and held < first:
        return first
    step, whole = kv_growth(first, longest), held if held >= first else whole_steps(first)
    return whole + -(-max(0, needed - whole) // step) * step


@dataclass(frozen=True)
class FixedShapes:
    """Pass shapes of a reproducible model, independent of other requests.

    The shapes of arrays choose the kernels, and each kernel rounds differently. So each decode pass
    has the same number of rows, with padding and with separate keys per row, and each prompt pass
    but the last the same number of tokens, counted from the beginning of the prompt, so that a
    stored prefix equals a computed one.
    """

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
