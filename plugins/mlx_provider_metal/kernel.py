"""The kernel: a list of (block of queries, block of keys), each for one SIMD group of 32 lanes.

A block of keys is read once for 16 queries. Each lane scores one key of 32; then each lane adds up
its share of the columns of the values. The test runs this text in NumPy (`tests/metal`), for which
it keeps to declarations, assignments, `for` and `if (lane == 0)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

Launch = Callable[..., list[mx.array]]
"""A kernel as `mx.fast.metal_kernel` returns it."""

LANES = 32
QUERIES = 16
"""Queries of a block."""
KEYS = 512
"""Keys of a block. Many blocks keep the device busy; each costs a row of results for a query."""
NAME = "mlx_provider_shared_prefix"
INPUTS = ("queries", "keys", "values", "work")
"""(Hk, M, D) float32, scaled, M a multiple of QUERIES; (1, Hk, P, D) twice, of any strides but with
columns side by side; (pairs, 3) int32: first query, first key, end of the keys."""
OUTPUTS = ("means", "totals")
"""(Hk, pairs, QUERIES, D) and (Hk, pairs, QUERIES), float32: as `Partial` of the core."""
SOURCE = """
uint lane = thread_position_in_threadgroup.x;
uint pair = threadgroup_position_in_grid.y;
uint head = threadgroup_position_in_grid.z;
int first = work[pair * 3];
int start = work[pair * 3 + 1];
int stop = work[pair * 3 + 2];
long of_queries = (long(head) * queries_shape[1] + first) * D;
long of_keys = long(head) * keys_strides[1];
long of_values = long(head) * values_strides[1];
threadgroup float asked[QUERIES * D];
float best[QUERIES];
float total[QUERIES];
float score[QUERIES];
float mean[QUERIES * COLUMNS];
for (int i = 0; i < QUERIES * COLUMNS; i++) {
    asked[i * 32 + lane] = queries[of_queries + i * 32 + lane];
    mean[i] = 0.0f;
}
for (int q = 0; q < QUERIES; q++) {
    best[q] = -1e30f;
    total[q] = 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int at = start; at < stop; at += 32) {
    long row = of_keys + long(min(int(at + lane), stop - 1)) * keys_strides[2];
    for (int q = 0; q < QUERIES; q++) {
        score[q] = 0.0f;
    }
    for (int d = 0; d < D; d++) {
        float key = float(keys[row + d]);
        for (int q = 0; q < QUERIES; q++) {
            score[q] += asked[q * D + d] * key;
        }
    }
    for (int q = 0; q < QUERIES; q++) {
        float own = select(-1e30f, score[q], int(at + lane) < stop);
        float top = max(best[q], simd_max(own));
        float kept = exp(best[q] - top);
        score[q] = exp(own - top);
        total[q] = total[q] * kept + simd_sum(score[q]);
        best[q] = top;
        for (int i = 0; i < COLUMNS; i++) {
            mean[q * COLUMNS + i] *= kept;
        }
    }
    for (int j = 0; j < min(32, stop - at); j++) {
        long value_row = of_values + long(at + j) * values_strides[2];
        for (int i = 0; i < COLUMNS; i++) {
            float value = float(values[value_row + i * 32 + lane]);
            for (int q = 0; q < QUERIES; q++) {
                mean[q * COLUMNS + i] += simd_broadcast(score[q], ushort(j)) * value;
            }
        }
    }
}
long out = (long(head) * work_shape[0] + pair) * QUERIES;
for (int q = 0; q < QUERIES; q++) {
    for (int i = 0; i < COLUMNS; i++) {
        means[(out + q) * D + i * 32 + lane] = mean[q * COLUMNS + i] / total[q];
    }
    if (lane == 0) {
        totals[out + q] = best[q] + log(total[q]);
    }
}
"""


def compiled() -> Launch:
    """The kernel. Raises `RuntimeError` on a device without Metal."""
    found: Any = mx.fast.metal_kernel(
        NAME, list(INPUTS), list(OUTPUTS), SOURCE, ensure_row_contiguous=False
    )
    return found  # type: ignore[no-any-return]


def pairs(queries: int, keys: int) -> list[tuple[int, int, int]]:
    """The work list. Blocks of queries follow each other, because they read the same keys."""
    return [
        (first, start, min(keys, start + KEYS))
        for start in range(0, keys, KEYS)
        for first in range(0, queries, QUERIES)
    ]
