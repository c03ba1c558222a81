"""Attention of all queries of a pass to a prefix, in one launch."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from mlx_provider import Function, Replacement

from .kernel import LANES, QUERIES, Launch, compiled, pairs
from .trial import better

LARGEST_WIDTH = 256
"""Largest size of a head: a lane keeps 16 queries times an eighth of the columns at most."""


def partial(
    launch: Launch, queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> tuple[mx.array, mx.array]:
    """(1, Hk, M, D) and (1, Hk, M, 1), float32: the values by their weights, and the logarithm of
    the sum of the weights."""
    _, heads, count, width = queries.shape
    whole = -(-count // QUERIES) * QUERIES
    asked = mx.pad((queries[0] * scale).astype(mx.float32), [(0, 0), (0, whole - count), (0, 0)])
    work = pairs(whole, keys.shape[2])
    means, totals = launch(
        inputs=[mx.contiguous(asked), keys, values, mx.array(work, dtype=mx.int32)],
        template=[("D", width), ("COLUMNS", width // LANES), ("QUERIES", QUERIES)],
        grid=(LANES, len(work), heads),
        threadgroup=(LANES, 1, 1),
        output_shapes=[(heads, len(work), QUERIES, width), (heads, len(work), QUERIES)],
        output_dtypes=[mx.float32, mx.float32],
    )
    blocks = len(work) * QUERIES // whole
    means = means.reshape(heads, blocks, whole, width)
    totals = totals.reshape(heads, blocks, whole, 1)
    total = mx.logsumexp(totals, axis=1, keepdims=True)
    mean = (means * mx.exp(totals - total)).sum(axis=1)
    return mean[None, :, :count], total[:, 0][None, :, :count]


def make(original: Function) -> Function:
    """`attend_prefix` of the core, but for quantised prefixes and uncommon heads.

    The original, if a trial does not find the kernel better. Raises any error of the compiler.
    """
    ours = functools.partial(partial, compiled())
    if not better(ours, lambda *given: original(*given, None)):
        return original

    def attend_prefix(
        queries: mx.array, keys: Any, values: Any, scale: float, cache: Any
    ) -> tuple[mx.array, mx.array]:
        if not _fits(queries, keys, values):
            found: tuple[mx.array, mx.array] = original(queries, keys, values, scale, cache)
            return found
        return ours(queries, keys, values, scale)

    return attend_prefix


def _fits(queries: mx.array, keys: Any, values: Any) -> bool:
    width = queries.shape[-1]
    return (
        isinstance(keys, mx.array)
        and width % LANES == 0
        and width <= LARGEST_WIDTH
        and values.shape[-1] == width
    )


REPLACEMENTS = (
    Replacement("mlx_provider.upstream.shared_attention", "attend_prefix", make, at_home=True),
)
