"""Measures the rounding noise of log-probabilities, to tell it from real errors.

A device uses different kernels for different batch widths, which sum in a different order. The
layers amplify the rounding by a factor that depends on the model, so no fixed tolerance separates
it from a wrong mask or offset. Three properties do. Equal rows in one batch without padding differ
only by rounding. A real error shows in more than one step, where a large rounding difference is
rare. A real error moves all likely tokens, not only one.
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
"""Number of the likeliest tokens of the row alone whose log-probabilities are compared."""
MULTIPLE = 4.0
"""A difference above this multiple of the noise is an error. In random models of 36 layers
(bfloat16 and 4 bit), noise reaches 2.1 times, and the smallest of a dozen layout errors 8 times."""
FEW = 16
"""One of this many values is rounded the other way in a copy of a row."""
SEEDS = 2**20
"""More than the arrays of a cache: each array has its own seed."""
HARMLESS = {"float32": 1e-3, "low": 0.02}
"""Differences that never count as errors, because a few steps may show little noise by chance."""
REACH = 0.25
"""Highest noise, as a share of the difference that another context makes. More would hide
errors."""
UNMEASURED = 0.05
"""The same share, used as the noise if equal rows cannot run."""


def spread(expected: mx.array, found: mx.array) -> float:
    """Root mean square difference of log-probabilities over the tokens likely by `expected`.

    Both are logits (vocab,). Infinite if any of them is not a number.
    """
    return _number(mx.sqrt(mx.mean(mx.square(_differences(expected, found)))))


def widest(expected: mx.array, found: mx.array) -> float:
    """Like `spread`, but the largest difference."""
    return _number(mx.max(mx.abs(_differences(expected, found))))


def lasting(spreads: Sequence[float]) -> float:
    """The difference that at least two steps show, from a row's spreads by step (two or more)."""
    return sorted(spreads)[-2]


def bound(precision: str, noise: Sequence[float], contexts: Sequence[float]) -> float:
    """The largest `lasting` difference at which a row still counts as the same as alone.

    `noise`: spreads of equal rows; empty if they could not run. `contexts`: spreads between
    different contexts.
    """
    reach = sum(contexts) / len(contexts)
    if not noise:
        return max(HARMLESS[precision], UNMEASURED * reach)
    mean = sum(noise) / len(noise)
    return max(HARMLESS[precision], min(MULTIPLE * mean, REACH * reach))


def copies(cache: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
    """A row cache repeated for `count` equal rows, with a few values rounded the other way.

    Padding alone may change the order of a sum even if the batch width does not. So the effect of
    one rounding difference is part of the noise of a model. `seed` chooses the values.
    """
    copied, seeds = copy.deepcopy(list(cache)), itertools.count(SEEDS * seed)
    for layer in leaves(copied):
        layer.state = tree_map(lambda each: _repeated(each, count, next(seeds)), layer.state)
    return copied


def _repeated(value: Any, count: int, seed: int) -> Any:
    """An array (1, ...) of a cache as (count, ...). Other values are returned unchanged."""
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
