"""Whether the kernel is correct and faster on this device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import mlx.core as mx

log = logging.getLogger(__name__)

HEADS, QUERIES, WIDTH = 8, 32, 128
"""Eight rows of a model with four heads for each head of keys."""
KEYS = 4096 + 40
"""The last block is not whole."""
TOLERANCE = 2e-2
"""Of results of about 0.1 with keys in bfloat16."""
REPEATS = 5

Attention = Callable[[mx.array, mx.array, mx.array, float], tuple[mx.array, mx.array]]


def better(ours: Attention, usual: Attention) -> bool:
    """Whether the kernel agrees with the usual operations, and is faster."""
    shape = (1, HEADS, KEYS, WIDTH)
    keys, values = (mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2))
    queries = mx.random.normal((1, HEADS, QUERIES, WIDTH)).astype(mx.bfloat16)
    given = queries, keys, values, WIDTH**-0.5
    apart = _apart(usual(*given), ours(*given))
    if not apart <= TOLERANCE:  # also if it is no number
        log.info("the kernel for shared prefixes is not used: it differs by %.2g", apart)
        return False
    before, after = (_seconds(each, *given) for each in (usual, ours))
    log.info("attention to a shared prefix: %.2f ms, with a kernel %.2f", before * 1e3, after * 1e3)
    return after < before


def _apart(some: tuple[mx.array, mx.array], others: tuple[mx.array, mx.array]) -> float:
    found = mx.stack([mx.abs(a - b).max() for a, b in zip(some, others, strict=True)])
    return float(found.max())


def _seconds(attention: Attention, *given: object) -> float:
    took = []
    for _ in range(REPEATS):
        began = perf_counter()
        mx.eval(attention(*given))  # type: ignore[arg-type]
        took.append(perf_counter() - began)
    return min(took)
