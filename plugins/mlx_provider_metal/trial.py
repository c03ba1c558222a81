"""Whether the kernel is correct and faster on this device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter

import mlx.core as mx

from . import prefix
from .kernel import Launch, compiled

log = logging.getLogger(__name__)

HEADS, QUERIES, WIDTH = 8, 32, 128
"""Eight rows of a model with four heads for each head of keys."""
KEYS = 4096 + 40
"""The last block is not whole."""
TOLERANCE = 2e-2
"""Of results of about 0.1 with keys in bfloat16."""
REPEATS = 5

Attention = Callable[[mx.array, mx.array, mx.array, float], tuple[mx.array, mx.array]]


@cache
def passes() -> bool:
    """The result of the trial, which runs once. Raises any error of the compiler."""
    return better(compiled())


def better(launch: Launch) -> bool:
    """Whether the kernel agrees with plain operations, and is faster."""
    shape = (1, HEADS, KEYS, WIDTH)
    keys, values = (mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2))
    queries = mx.random.normal((1, HEADS, QUERIES, WIDTH)).astype(mx.bfloat16)
    given = queries, keys, values, WIDTH**-0.5
    apart = _apart(plain(*given), prefix.partial(launch, *given))
    if not apart <= TOLERANCE:  # also if it is no number
        log.info("the kernel for shared prefixes is not used: it differs by %.2g", apart)
        return False
    usual, ours = (_seconds(each, *given) for each in (plain, partial(prefix.partial, launch)))
    log.info("attention to a shared prefix: %.2f ms, with a kernel %.2f", usual * 1e3, ours * 1e3)
    return ours < usual


def plain(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> tuple[mx.array, mx.array]:
    """The same by operations of MLX."""
    scores = (queries * scale) @ keys.swapaxes(-1, -2)
    weights = mx.softmax(scores, axis=-1, precise=True)
    top, largest = (x.max(axis=-1, keepdims=True).astype(mx.float32) for x in (scores, weights))
    return (weights @ values).astype(mx.float32), top - mx.log(largest)


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
