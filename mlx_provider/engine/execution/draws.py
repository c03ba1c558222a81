"""Draws one token per row from its logits. A GPU runs each draw as one compiled graph.

Column arrays (R, 1) have the parameters of the rows. A row without a parameter has a value that
changes nothing, so that it draws the same beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from math import inf, log

import mlx.core as mx

from ..request import SamplingParams
from .truncation import best, threshold, units

FEW, MANY = 64, 256
"""For top-k up to these values, this many best tokens are examined. Above, a threshold is
searched."""

Columns = Mapping[str, mx.array]
Draw = Callable[[mx.array, Columns, mx.array], mx.array]
"""(logits (R, vocab), parameters, keys (R, 2)) -> tokens (R,) int32."""


def kind(params: SamplingParams) -> str:
    """The method for these parameters, a key of `DRAWS`."""
    if not params.truncated:
        return "all"
    if 0 < params.top_k <= MANY:
        return "few" if params.top_k <= FEW else "many"
    return "above"


def sample(
    method: str, logits: mx.array, params: Sequence[SamplingParams], keys: mx.array
) -> mx.array:
    """Tokens (R,) int32 of rows that have one method. Nothing is read back."""
    draws = COMPILED if compiles() else DRAWS
    return draws[method](logits, _columns(params), keys)


def compiles() -> bool:
    """Whether draws are compiled. A CPU would start a C++ compiler in the middle of a step."""
    return bool(mx.default_device() == mx.gpu)


def _columns(params: Sequence[SamplingParams]) -> dict[str, mx.array]:
    found = {"temperature": _column(p.temperature for p in params)}
    if any(p.top_k > 0 for p in params):
        found["top_k"] = mx.array([[p.top_k] for p in params], mx.uint32)
    if any(p.top_p < 1 for p in params):
        found["top_p"] = _column(p.top_p if p.top_p < 1 else inf for p in params)
    if any(p.min_p > 0 for p in params):  # as a distance from the highest logit
        found["min_p"] = _column(log(p.min_p) if p.min_p > 0 else -inf for p in params)
    return found


def _column(values: Iterable[float]) -> mx.array:
    return mx.array([[value] for value in values], dtype=mx.float32)


def _all(logits: mx.array, columns: Columns, keys: mx.array) -> mx.array:
    """Among all tokens."""
    scaled = logits / columns["temperature"]
    return mx.argmax(scaled + _noise(keys, scaled.shape[-1]), axis=-1).astype(mx.int32)


def _best(logits: mx.array, columns: Columns, keys: mx.array, *, count: int) -> mx.array:
    """Among the best `count` tokens that top-k, top-p and min-p allow."""
    scaled = logits / columns["temperature"]
    ids = best(scaled, count)
    values = mx.take_along_axis(scaled, ids, axis=-1)
    place = mx.arange(ids.shape[-1])[None]
    kept = place < columns["top_k"]
    if "top_p" in columns:  # of the probability mass that top-k leaves
        probs = mx.softmax(mx.where(kept, values, -inf), axis=-1)
        kept = kept & (mx.cumsum(probs, axis=-1) - probs < columns["top_p"])
    if "min_p" in columns:
        kept = kept & (values - values[:, :1] >= columns["min_p"])
    kept = kept | (place == 0)
    noisy = mx.where(kept, values + _noise(keys, count)[:, : ids.shape[-1]], -inf)
    drawn = mx.take_along_axis(ids, mx.argmax(noisy, axis=-1, keepdims=True), axis=-1)
    return drawn[:, 0].astype(mx.int32)


def _above(logits: mx.array, columns: Columns, keys: mx.array) -> mx.array:
    """Among the tokens above the logit threshold of top-k, top-p and min-p."""
    scaled = logits / columns["temperature"]
    highest = mx.max(scaled, axis=-1, keepdims=True)
    bounds, kept = [], scaled
    if "min_p" in columns:
        bounds.append(highest + columns["min_p"])
    if "top_k" in columns:
        count = columns["top_k"]
        found = threshold(scaled, mx.ones(scaled.shape, mx.uint32), count)
        bounds.append(mx.where(count > 0, found, -inf))
        kept = mx.where(scaled >= bounds[-1], scaled, -inf)
    if "top_p" in columns:
        share = columns["top_p"]
        found = threshold(scaled, units(mx.softmax(kept, axis=-1)), units(mx.minimum(share, 1)))
        bounds.append(mx.where(share <= 1, found, -inf))
    kept = (scaled >= reduce(mx.maximum, bounds)) | (scaled == highest)
    noisy = mx.where(kept, scaled + _noise(keys, scaled.shape[-1]), -inf)
    return mx.argmax(noisy, axis=-1).astype(mx.int32)


def _noise(keys: mx.array, count: int) -> mx.array:
    """Gumbel noise (R, count). Row i depends only on key i."""
    return mx.vmap(lambda key: mx.random.gumbel(shape=(count,), key=key))(keys)


DRAWS: Mapping[str, Draw] = {
    "all": _all,
    "few": partial(_best, count=FEW),
    "many": partial(_best, count=MANY),
    "above": _above,
}
COMPILED: Mapping[str, Draw] = {name: mx.compile(each) for name, each in DRAWS.items()}
