"""Penalties for tokens in the prompt or the reply, counted as the reply grows.

Finds the best tokens of each row, and logit thresholds, without a full sort.

A sort of the vocabulary dominates the time on a GPU, where upstream's `argpartition` is a full
sort, too (mlx 0.32.4, backend/metal/sort.cpp).

Draws one token per row from its logits. A GPU runs each draw as one compiled graph.

Column arrays (R, 1) have the parameters of the rows. A row without a parameter has a value that
changes nothing, so that it draws the same beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import inf, log

import mlx.core as mx
import numpy as np

from ..request import Row, SamplingParams


@dataclass
class History:
    """Token counts of a row, updated by one token per step."""

    in_prompt: mx.array
    """(vocab,) bool."""
    counts: mx.array
    """(vocab,) int32: the number of times that each token is in the reply."""
    taken: int = 0
    """Tokens of the reply that are counted."""

    @classmethod
    def of(cls, row: Row, vocab: int) -> History:
        """The history of a row whose reply is not counted yet."""
        seen = np.bincount(np.asarray(row.request.prompt.tokens, np.int64), minlength=vocab) > 0
        return cls(mx.array(seen[:vocab]), mx.zeros(vocab, mx.int32))

    def follow(self, tokens: Sequence[int]) -> None:
        """Count the new tokens of the reply."""
        if new := list(tokens[self.taken :]):
            self.counts = self.counts.at[mx.array(new)].add(1)
            self.taken = len(tokens)


def penalised(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """(B, vocab) with the penalties of the rows that have any."""
    wanted = [i for i, row in enumerate(rows) if row.request.params.penalised]
    if not wanted:
        return logits
    histories = [_followed(rows[i], logits.shape[-1]) for i in wanted]
    params = [rows[i].request.params for i in wanted]
    index, counts = mx.array(wanted), mx.stack([h.counts for h in histories])
    own, written = logits[index], counts > 0
    repeated = mx.stack([h.in_prompt for h in histories]) | written
    divisor = _column([p.repetition_penalty for p in params])
    own = mx.where(repeated, mx.where(own > 0, own / divisor, own * divisor), own)
    own = own - _column([p.presence_penalty for p in params]) * written
    own = own - _column([p.frequency_penalty for p in params]) * counts
    changed = logits + 0  # the input must not change
    changed[index] = own
    return changed


def _followed(row: Row, vocab: int) -> History:
    if row.history is None:
        row.history = History.of(row, vocab)
    history: History = row.history
    history.follow(row.tokens)
    return history


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


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
    found = {"temperature": _column_draws(p.temperature for p in params)}
    if any(p.top_k > 0 for p in params):
        found["top_k"] = mx.array([[p.top_k] for p in params], mx.uint32)
    if any(p.top_p < 1 for p in params):
        found["top_p"] = _column_draws(p.top_p if p.top_p < 1 else inf for p in params)
    if any(p.min_p > 0 for p in params):  # as a distance from the highest logit
        found["min_p"] = _column_draws(log(p.min_p) if p.min_p > 0 else -inf for p in params)
    return found


def _column_draws(values: Iterable[float]) -> mx.array:
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
