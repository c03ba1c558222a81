"""Finds the best tokens of each row, and logit thresholds, without a full sort.

A sort of the vocabulary dominates the time on a GPU, where upstream's `argpartition` is a full
sort, too (mlx 0.32.4, backend/metal/sort.cpp).
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

BLOCK = 64
"""Tokens of one block. The best tokens are in the blocks with the highest maxima."""
HALVINGS = 20
"""Bisection steps over the range of logits. Values that are then indistinguishable count as
equal."""
RANGE = 30.0
"""Logit distance from the maximum beyond which probabilities do not matter."""


def best(values: mx.array, count: int) -> mx.array:
    """Ids of the highest values of each row, best first: (R, vocab) -> (R, at most `count`)."""
    rows, size = values.shape
    count = min(count, size)
    if size <= 2 * BLOCK * count:
        return _sorted(values, mx.argpartition(-values, count - 1, axis=-1)[:, :count])
    spare = -size % BLOCK
    padded = mx.pad(values, [(0, 0), (0, spare)], constant_values=-mx.inf) if spare else values
    highest = mx.max(padded.reshape(rows, -1, BLOCK), axis=-1)
    blocks = mx.argpartition(-highest, count - 1, axis=-1)[:, :count]
    ids = (blocks[..., None] * BLOCK + mx.arange(BLOCK)).reshape(rows, -1)
    among = mx.argpartition(-mx.take_along_axis(padded, ids, axis=-1), count - 1, axis=-1)
    return _sorted(padded, mx.take_along_axis(ids, among[:, :count], axis=-1))


@partial(mx.compile, shapeless=True)  # 84 operations in place of 163
def threshold(values: mx.array, weights: mx.array, wanted: mx.array) -> mx.array:
    """The highest value at and above which the weights sum up to `wanted`: (R, vocab) -> (R, 1).

    Found by bisection, without reading back. If there is no such value: the lowest value that
    counts.
    """
    high = mx.max(values, axis=-1, keepdims=True)
    low = mx.maximum(mx.min(values, axis=-1, keepdims=True), high - RANGE)
    span = high - low
    for halving in range(1, HALVINGS + 1):
        middle = low + span / 2**halving
        found = mx.sum(mx.where(values >= middle, weights, 0), axis=-1, keepdims=True)
        low = mx.where(found >= wanted, middle, low)
    return low


def _sorted(values: mx.array, ids: mx.array) -> mx.array:
    order = mx.argsort(-mx.take_along_axis(values, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)
