"""What attention costs a row if its parts never depend on other rows.

Its keys are attended in blocks of a fixed number of tokens from the beginning, in company and
alone. So rows with a common prefix could use the same blocks, without other bits. The rows may read
a block in one product, or each in its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.base import scaled_dot_product_attention

from kernel_count import fused, nodes
from mlx_provider.upstream.cache_classes import KVCache
from mlx_provider.upstream.mlx_lm import quantised
from mlx_provider.upstream.shared_kv import Shared, _partial, cut
from shared_prefix import GROUP, SIZES

BLOCK = 256
"""Tokens of a pass of a reproducible model, to which its stored prefixes are cut."""
ROWS = 8
REPEATS = 7
HEADS, KV_HEADS, WIDTH = (
    SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
)
SCALE = WIDTH**-0.5


@dataclass(frozen=True)
class Attention:
    """One way in which a row attends, in one layer."""

    seconds: float
    """Of one row."""
    eight: float
    """Seconds of eight rows."""
    kernels: int
    """That one row launches where the device has a fused kernel for all of its keys."""
    equal: bool
    """Whether every row gets the same bits at every place beside zero to seven others."""


@dataclass(frozen=True)
class Measured:
    bits: int | None
    """Of keys and values."""
    prefix: int
    whole: Attention
    """Each row has its own copy of the prefix, as in a reproducible model today."""
    copied: Attention
    """It is copied in front of the row's own block in each step."""
    apart: Attention
    """In blocks, with a product for each row."""
    together: Attention
    """In blocks, with one product of all rows."""


def run(bits: int | None, prefixes: Iterable[int] = (4096, 16_384)) -> list[Measured]:
    return [_measured(bits, prefix) for prefix in prefixes]


def _measured(bits: int | None, prefix: int) -> Measured:
    cache: Any = KVCache() if bits is None else quantised([KVCache()], bits, GROUP)[0]
    shape = 1, KV_HEADS, prefix + BLOCK, WIDTH
    keys, values = cache.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
    queries = mx.random.normal((ROWS, HEADS, 1, WIDTH))
    shared = [
        Shared(cut(each, 0, prefix), tree_map(mx.contiguous, cut(each, prefix, prefix + BLOCK)))
        for each in (keys, values)
    ]
    mx.eval(keys, values, queries, [each.tail for each in shared])

    def whole(rows: mx.array, keys: Any = keys, values: Any = values) -> mx.array:
        each = [
            scaled_dot_product_attention(row, keys, values, cache, scale=SCALE, mask=None)
            for row in mx.split(rows, rows.shape[0])
        ]
        return mx.concatenate(each) if len(each) > 1 else each[0]

    def copied(rows: mx.array) -> mx.array:
        return mx.concatenate(
            [whole(row, *(each.whole() for each in shared)) for row in mx.split(rows, len(rows))]
        )

    def apart(rows: mx.array) -> mx.array:
        return _in_blocks(rows[:, :, None], keys, values, cache)

    def together(rows: mx.array) -> mx.array:
        return _in_blocks(rows.swapaxes(0, 2)[:, :, None], keys, values, cache).swapaxes(0, 2)

    return Measured(
        bits, prefix, *(_of(each, queries) for each in (whole, copied, apart, together))
    )


def _in_blocks(queries: mx.array, keys: Any, values: Any, cache: Any) -> mx.array:
    """Attention of queries (rows, H, 1, count, D) to whole blocks. (rows, H, count, D)"""
    rows, *_, count, _ = queries.shape
    folded = queries.reshape(rows, KV_HEADS, 1, -1, WIDTH)
    parts = [tree_map(_cut, each) for each in (keys, values)]
    found = _partial(folded, *parts, SCALE, None, cache)
    mean = (found.mean * mx.softmax(found.total, axis=2)).sum(axis=2)
    return mean.reshape(rows, HEADS, count, WIDTH)


def _cut(stored: mx.array) -> mx.array:
    """(1, Hk, blocks, BLOCK, D)"""
    return stored.reshape(1, KV_HEADS, -1, BLOCK, stored.shape[-1])


def _of(attend: Callable[[mx.array], mx.array], queries: mx.array) -> Attention:
    alone = [attend(each) for each in mx.split(queries, ROWS)]
    equal = all(
        mx.array_equal(mx.concatenate(alone[first:stop]), attend(queries[first:stop]))
        for count in range(1, ROWS + 1)
        for first, stop in ((0, count), (ROWS - count, ROWS))
    )
    with fused():
        kernels = len(nodes(attend(queries[:1])))
    return Attention(
        _seconds(lambda: attend(queries[:1])), _seconds(lambda: attend(queries)), kernels, equal
    )


def _seconds(attend: Callable[[], mx.array]) -> float:
    """Of the fastest run."""
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        mx.eval(attend())
        took.append(time.perf_counter() - began)
    return min(took)
