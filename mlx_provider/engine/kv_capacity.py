"""For how many tokens a row's cache has capacity: for its prompt and a reserve of output at once,
then in steps that a long reply seldom takes. Imports no mlx.

A buffer that grows is copied, and the freed one is of no use to MLX's pool, which takes a buffer
again only for nearly its size (mlx 0.32, backend/metal/allocator.cpp).
"""

from __future__ import annotations

STEP_TOKENS = 256
"""Tokens of which every capacity is a multiple (mlx_lm/models/cache.py 0.32.2, `KVCache.step`)."""
LEAST_GROWTH_TOKENS = 1024
"""Least tokens by which a row grows beyond its reserve, where its reply may be as long."""
GROWTH_SHARE = 8
"""A longer row grows by this part of its first capacity."""


def whole_steps(tokens: int) -> int:
    """Tokens that are allocated where `tokens` are asked for."""
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


def kv_growth(first: int, longest: int) -> int:
    """Tokens by which a row grows whose first capacity was `first`; it ends at `longest` tokens."""
    wanted = max(LEAST_GROWTH_TOKENS, first // GROWTH_SHARE)
    return whole_steps(max(1, min(wanted, longest - first)))


def kv_capacity(first: int, longest: int, needed: int) -> int:
    """The capacity of such a row once it needs `needed` tokens."""
    if needed <= first:
        return first
    step, whole = kv_growth(first, longest), whole_steps(first)
    return whole + -(-max(0, needed - whole) // step) * step
