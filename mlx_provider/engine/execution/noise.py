"""How far log-probabilities lie apart by rounding alone, and what is more than that.

A device runs other kernels for other widths of a batch, which sum in another order. The model's
layers carry the rounding on, each model by a factor of its own, so no fixed tolerance tells it from
a wrong mask or offset. Three things do. Equal rows in one batch, without padding, show the rounding
and nothing else. What is wrong stays wrong: it shows in more than one step, where a large rounding
is rare. And what is wrong moves all likely tokens, not one of them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..memory import leaves

LIKELY = 64
"""Tokens, the likeliest of the row alone, whose log-probabilities are compared."""
MULTIPLE = 4.0
"""Times the noise beyond which a difference is none of it. In random models of 36 layers, bfloat16
and 4 bit, noise reaches 2.1 times, and the least of a dozen errors of a layout 8 times."""
FEW = 16
"""One of so many values is rounded the other way in a copy of a row."""
SEEDS = 2**20
"""More than a cache has arrays: each array has its own seed."""
LEAST = {"float32": 1e-3, "low": 0.02}
"""Differences that are never taken for an error: few steps may happen to show little noise."""
REACH = 0.25
"""Share of what another context makes that noise may not reach: it would hide any error."""
UNMEASURED = 0.05
"""The same share, taken for the noise where equal rows cannot be run."""


def spread(expected: mx.array, found: mx.array) -> float:
    """Root mean square difference of log-probabilities, among the tokens likely by `expected`.

    Both are logits (vocab,). Infinite where any of them is no number.
    """
    return _number(mx.sqrt(mx.mean(mx.square(_differences(expected, found)))))


def widest(expected: mx.array, found: mx.array) -> float:
    """As `spread`, the largest difference."""
    return _number(mx.max(mx.abs(_differences(expected, found))))


def lasting(spreads: Sequence[float]) -> float:
    """The difference that at least two steps show, of a row's spreads by step (two or more)."""
    return sorted(spreads)[-2]


def bound(precision: str, noise: Sequence[float], contexts: Sequence[float]) -> float:
    """The `lasting` difference up to which a row counts as the same as alone.

    `noise`: spreads of equal rows; empty: they could not be run. `contexts`: spreads between
    different contexts.
    """
    reach = sum(contexts) / len(contexts)
    if not noise:
        return max(LEAST[precision], UNMEASURED * reach)
    mean = sum(noise) / len(noise)
    return max(LEAST[precision], min(MULTIPLE * mean, REACH * reach))


def copies(cache: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
    """A row cache as that of `count` equal rows, a few of whose values are rounded the other way.

    Padding alone may change the order of a sum, where the width of the batch does not: what one
    rounding makes in this model is part of its noise. `seed`: which values those are.
    """
    copied, seeds = copy.deepcopy(list(cache)), itertools.count(SEEDS * seed)
    for layer in leaves(copied):
        layer.state = tree_map(lambda each: _repeated(each, count, next(seeds)), layer.state)
    return copied


def _repeated(value: Any, count: int, seed: int) -> Any:
    """An array (1, ...) of a cache as (count, ...); anything else as it is."""
    if not isinstance(value, mx.array) or value.ndim < 2:
        return value
    rows = mx.repeat(value, count, axis=0)
    if not mx.issubdtype(value.dtype, mx.floating):
        return rows
    half = mx.finfo(value.dtype).eps / 2
    drawn = mx.random.uniform(-1, 1, rows.shape, key=mx.random.key(seed))
    moved = mx.where(mx.abs(drawn) < 1 / FEW, half * mx.sign(drawn), 0.0)
    return (rows.astype(mx.float32) * (1 + moved)).astype(value.dtype)


def _differences(expected: mx.array, found: mx.array) -> mx.array:
    first, second = (_logprobs(each) for each in (expected, found))
    likely = mx.argpartition(-first, min(LIKELY, first.size) - 1)[:LIKELY]
    return first[likely] - second[likely]


def _logprobs(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits)


def _number(value: mx.array) -> float:
    number: float = value.item()  # type: ignore[assignment]
    return math.inf if math.isnan(number) else number
