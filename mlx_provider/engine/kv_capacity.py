"""The token capacity of a row's cache: the prompt and an output reserve, then steps that a long
reply seldom needs. Imports no mlx.

A growing buffer is copied, and MLX's pool reuses the freed one only for nearly the same size (mlx
0.32, backend/metal/allocator.cpp).
"""

from __future__ import annotations

STEP_TOKENS = 256
"""Every capacity is a multiple of this (mlx_lm/models/cache.py 0.32.2, `KVCache.step`)."""
LEAST_GROWTH_TOKENS = 1024
"""Least growth of a row beyond its reserve, if its reply may become so long."""
GROWTH_SHARE = 8
"""A long row grows by this fraction (1/n) of its first capacity."""


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
