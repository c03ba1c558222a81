"""For how many tokens a row's cache has room: for its prompt and a reserve of output at once, then
by steps that a long reply seldom takes. Imports no mlx.

A buffer that grows is copied, and the freed one is of no use to MLX's pool, which takes a buffer
again only for nearly its size (mlx 0.32, backend/metal/allocator.cpp).
"""

from __future__ import annotations

STEP = 256
"""Tokens of which every capacity is a multiple (mlx_lm/models/cache.py 0.32.2, `KVCache.step`)."""
GROWTH = 1024
"""Least tokens by which a row grows beyond its reserve, where its reply may be as long."""
GROWTH_SHARE = 8
"""A longer row grows by this part of its first room."""


def whole_steps(tokens: int) -> int:
    """Tokens that are allocated where `tokens` are asked for."""
    return -(-tokens // STEP) * STEP


def growth(room: int, longest: int) -> int:
    """Tokens by which a row grows whose first room was `room`; it ends at `longest` tokens."""
    wanted = max(GROWTH, room // GROWTH_SHARE)
    return whole_steps(max(1, min(wanted, longest - room)))


def grown(room: int, longest: int, needed: int) -> int:
    """Tokens for which such a row has room once it needs it for `needed`."""
    if needed <= room:
        return room
    step, first = growth(room, longest), whole_steps(room)
    return first + -(-max(0, needed - first) // step) * step
