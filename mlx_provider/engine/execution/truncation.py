"""Finds the best tokens of each row, and logit thresholds, without a full sort.

A sort of the vocabulary dominates the time on a GPU, where upstream's `argpartition` is a full
sort, too (mlx 0.32.4, backend/metal/sort.cpp).
"""

from __future__ import annotations

import mlx.core as mx

BLOCK = 64
"""Tokens of one block. The best tokens are in the blocks with the highest maxima."""
BINS = 1024
"""Intervals of the range of logits, and of the interval that is looked at again. Values within one
of those count as equal."""
UNIT = 2.0**31
"""Sum of the weights for shares. Metal adds 32-bit integers in any order, with one result."""
MARGIN = 0.25
"""Share of an interval by which rounding may move a value. Those that are so near count, too."""
LEAST_SPAN = 1e-6
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


def threshold(values: mx.array, weights: mx.array, wanted: mx.array) -> mx.array:
    """The highest value at and above which the weights sum up to `wanted`, a (R, 1): (R, vocab) ->
    (R, 1). Weights and sums are uint32.

    Nothing is read back. If there is no such value: the lowest value that counts.
    """
    high = mx.max(values, axis=-1, keepdims=True)
    low = mx.maximum(mx.min(values, axis=-1, keepdims=True), high - RANGE)
    step = mx.maximum(high - low, LEAST_SPAN) / BINS**2
    at = mx.minimum((high - values) / step, BINS**2).astype(mx.int32)
    coarse = at // BINS
    above, weight = _before(coarse, weights, wanted)
    # the bin that reaches `wanted`, in finer ones; values of other bins do not count
    fine = mx.where(coarse == above, at - above * BINS, BINS)
    finer, _ = _before(fine, weights, wanted - weight)
    return high - step * (above * BINS + finer + (1 + MARGIN))


def units(shares: mx.array) -> mx.array:
    """Shares of a sum of 1 as weights. Sums of them are exact, so their order does not matter."""
    return (shares * UNIT + 0.5).astype(mx.uint32)


def _before(bins: mx.array, weights: mx.array, wanted: mx.array) -> tuple[mx.array, mx.array]:
    """How many bins from 0 on do not reach `wanted` together, and their weight: (R, vocab) ->
    (R, 1). The last bin counts as empty."""
    rows = bins.shape[0]
    first = mx.arange(0, rows * (BINS + 1), BINS + 1)[:, None]
    at = (bins + first).reshape(-1)
    empty = mx.zeros((rows * (BINS + 1),), mx.uint32)
    found = empty.at[at].add(weights.reshape(-1)).reshape(rows, -1)[:, :BINS]
    short = mx.cumsum(found, axis=-1) < wanted
    weight = mx.sum(mx.where(short, found, 0), axis=-1, keepdims=True)
    return mx.sum(short, axis=-1, keepdims=True), weight


def _sorted(values: mx.array, ids: mx.array) -> mx.array:
    order = mx.argsort(-mx.take_along_axis(values, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)
