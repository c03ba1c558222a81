"""Draws one token for every row in one graph, with the parameters of each row.

The draw of a row depends only on its own logits, parameters, seed and position, so it is the same
in any batch: Gumbel noise from a counter-based key. Nothing here waits for the device.

Order of changes to the logits: penalties, bias, grammar mask, temperature, top-k, top-p, min-p (the
order of the logits processors of transformers 5). Logprobs are those of the raw logits.

The vocabulary is never sorted: a sort dominates the time on a GPU, where upstream's `argpartition`
is a full sort, too (mlx 0.32.4, backend/metal/sort.cpp)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import inf, log

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..request import Row, SamplingParams

BLOCK = 64
"""Tokens of one block. The best `n` tokens are in the `n` blocks with the highest maxima."""
BINS = 1024
"""`threshold` divides the range of logits into so many intervals, then one of them again into so
many. Values within one of these small intervals count as equal."""
UNIT = 2.0**31  # weight of a share of 1, see `units`
MARGIN = 0.25
"""How far rounding may move a value, in small intervals. Values that are so near count, too."""
LEAST_SPAN = 1e-6  # of the range of logits that `threshold` divides
RANGE = 30.0  # logit distance from the maximum beyond which probabilities do not matter
FEW, MANY = 64, 256
"""For top-k up to these values, so many best tokens are examined. Above, a threshold is found."""
Columns = Mapping[str, mx.array]
"""Parameters of the rows, each (R, 1). A row without a parameter has a value that changes nothing,
so that it draws the same beside others."""
Draw = Callable[[mx.array, Columns, mx.array], mx.array]
"""(logits (R, vocab), parameters, keys (R, 2)) -> tokens (R,) int32."""


@dataclass(frozen=True)
class Logprobs:
    """Raw log-probabilities for rows that want them. Row i: of the drawn token `indices[i]`."""

    indices: list[int]
    counts: list[int]  # number of alternatives that each row wants
    drawn: mx.array  # (R,) of the drawn token
    top_ids: mx.array  # (R, K) best first
    top: mx.array  # (R, K)


@dataclass(frozen=True, eq=False)
class Drawn:
    tokens: mx.array  # (B,) int32
    logprobs: Logprobs | None

    @property
    def arrays(self) -> list[mx.array]:
        asked = self.logprobs
        return [self.tokens, *([asked.drawn, asked.top_ids, asked.top] if asked else [])]


def draw(
    logits: mx.array, rows: Sequence[Row], masks: Sequence[NDArray[np.uint32] | None]
) -> Drawn:
    """Draw the next token of each row. logits: (B, vocab), any float dtype; `masks[i]`: bits of
    allowed tokens, (ceil(vocab/32),), or `None` if all are allowed."""
    raw = logits.astype(mx.float32)
    unchanged = all(r.request.params.plain and len(r.tokens) >= r.request.min_tokens for r in rows)
    if unchanged and all(mask is None for mask in masks):
        tokens = mx.argmax(raw, axis=-1).astype(mx.int32)
        return Drawn(tokens, _logprobs(raw, tokens, rows))
    changed = _mask(_bias(apply_penalties(raw, rows), rows), masks)
    methods = [None if r.request.params.greedy else _method(r.request.params) for r in rows]
    if methods[0] is not None and len(set(methods)) == 1:  # then no logits are copied
        tokens = _sample(changed, rows, methods[0])
    else:
        tokens = mx.argmax(changed, axis=-1).astype(mx.int32)
        for method in dict.fromkeys(filter(None, methods)):
            wanted = [i for i, own in enumerate(methods) if own == method]
            index = mx.array(wanted)
            tokens[index] = _sample(changed[index], [rows[i] for i in wanted], method)
    return Drawn(tokens, _logprobs(raw, tokens, rows))


def score(logits: mx.array, tokens: mx.array, row: Row) -> Drawn:
    """Tokens (T,) of the row's prompt in the form of drawn tokens, with log-probabilities. logits:
    (T, vocab), of which each vector predicts the token of the same index."""
    return Drawn(tokens, _logprobs(logits.astype(mx.float32), tokens, [row] * tokens.size))


def _bias(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Add biases, and forbid stop tokens of short replies, in one sparse scatter."""
    found: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        offsets: dict[int, float] = dict(row.request.params.logit_bias)
        if len(row.tokens) < row.request.min_tokens:
            offsets |= dict.fromkeys(row.request.stop_tokens, -np.inf)
        found += [(i, token, offset) for token, offset in offsets.items()]
    if not found:
        return logits
    at_row, at_token, shift = map(mx.array, zip(*found, strict=True))
    return logits.at[at_row, at_token].add(shift.astype(mx.float32))


def _mask(logits: mx.array, masks: Sequence[NDArray[np.uint32] | None]) -> mx.array:
    wanted = [i for i, mask in enumerate(masks) if mask is not None]
    if not wanted:
        return logits
    # one mask for the whole batch: gathering and scattering rows costs twice as much
    allowed = np.ones(logits.shape, dtype=np.bool_)
    bits = np.stack([m for m in masks if m is not None]).astype("<u4", copy=False)
    unpacked = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    allowed[wanted] = unpacked[:, : logits.shape[-1]]
    return mx.where(mx.array(allowed), logits, -mx.inf)


def _keys(rows: Sequence[Row]) -> mx.array:
    """(R, 2) uint32: one counter-based key per row and position."""
    mixed = [_mix_seed(row.request.params.seed, row.index) for row in rows]
    pairs = [(n >> 32, (n + len(row.tokens)) % 2**32) for n, row in zip(mixed, rows, strict=True)]
    return mx.array(pairs, dtype=mx.uint32)


@lru_cache(maxsize=1024)
def _mix_seed(seed: int, choice: int) -> int:
    return _mix(_mix(seed % 2**64) ^ choice)


def _mix(x: int) -> int:
    """A bijection of 64-bit numbers; each bit depends on all (splitmix64's finaliser)."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _logprobs(raw: mx.array, tokens: mx.array, rows: Sequence[Row]) -> Logprobs | None:
    wanted = [i for i, row in enumerate(rows) if row.request.logprobs is not None]
    if not wanted:
        return None
    index = mx.array(wanted)
    own = raw[index]
    own = own - mx.logsumexp(own, axis=-1, keepdims=True)
    counts = [rows[i].request.logprobs or 0 for i in wanted]
    top_ids = best(own, max(1, *counts))
    drawn = mx.take_along_axis(own, tokens[index][:, None], axis=-1)[:, 0]
    return Logprobs(wanted, counts, drawn, top_ids, mx.take_along_axis(own, top_ids, axis=-1))


@dataclass
class History:
    """The tokens of a row, as its penalties need them."""

    in_prompt: mx.array  # (vocab,) bool
    counts: mx.array  # (vocab,) int32: the number of times that each token is in the reply
    taken: int = 0  # tokens of the reply that are counted


def apply_penalties(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Logits (B, vocab) with the penalties of the rows that have any. Changes no argument."""
    wanted = [i for i, row in enumerate(rows) if row.request.params.penalised]
    if not wanted:
        return logits
    histories = [_history(rows[i], logits.shape[-1]) for i in wanted]
    params = [rows[i].request.params for i in wanted]
    index, counts = mx.array(wanted), mx.stack([h.counts for h in histories])
    own, written = logits[index], counts > 0
    repeated = mx.stack([h.in_prompt for h in histories]) | written
    divisor = _column([p.repetition_penalty for p in params])
    own = mx.where(repeated, mx.where(own > 0, own / divisor, own * divisor), own)
    own = own - _column([p.presence_penalty for p in params]) * written
    own = own - _column([p.frequency_penalty for p in params]) * counts
    changed = logits + 0  # a copy
    changed[index] = own
    return changed


def _history(row: Row, vocab: int) -> History:
    if row.history is None:
        prompt = np.asarray(row.request.prompt.tokens, np.int64)
        seen = np.bincount(prompt, minlength=vocab)[:vocab] > 0
        row.history = History(mx.array(seen), mx.zeros(vocab, mx.int32))
    history: History = row.history
    if new := list(row.tokens[history.taken :]):
        history.counts = history.counts.at[mx.array(new)].add(1)
        history.taken = len(row.tokens)
    return history


def best(values: mx.array, count: int) -> mx.array:
    """Ids of the highest values of each row, best first: (R, vocab) -> (R, at most `count`)."""
    rows, size = values.shape
    count = min(count, size)
    if size <= 2 * BLOCK * count:
        return _sort(values, mx.argpartition(-values, count - 1, axis=-1)[:, :count])
    spare = -size % BLOCK
    padded = mx.pad(values, [(0, 0), (0, spare)], constant_values=-mx.inf) if spare else values
    highest = mx.max(padded.reshape(rows, -1, BLOCK), axis=-1)
    blocks = mx.argpartition(-highest, count - 1, axis=-1)[:, :count]
    ids = (blocks[..., None] * BLOCK + mx.arange(BLOCK)).reshape(rows, -1)
    among = mx.argpartition(-mx.take_along_axis(padded, ids, axis=-1), count - 1, axis=-1)
    return _sort(padded, mx.take_along_axis(ids, among[:, :count], axis=-1))


def threshold(values: mx.array, weights: mx.array, wanted: mx.array) -> mx.array:
    """The highest value (R, 1) for which the weights of all values (R, vocab) that are not lower
    reach `wanted` (R, 1), as exact as `BINS` permit. If there is none: the lowest value within
    `RANGE` of the maximum. `weights`, `wanted`: uint32. Does not wait for the device."""
    high = mx.max(values, axis=-1, keepdims=True)
    low = mx.maximum(mx.min(values, axis=-1, keepdims=True), high - RANGE)
    step = mx.maximum(high - low, LEAST_SPAN) / BINS**2
    at = mx.minimum((high - values) / step, BINS**2).astype(mx.int32)
    coarse = at // BINS
    above, weight = _before(coarse, weights, wanted)
    # divide the bin that reaches `wanted` again; values of other bins go to a bin that is ignored
    fine = mx.where(coarse == above, at - above * BINS, BINS)
    finer, _ = _before(fine, weights, wanted - weight)
    return high - step * (above * BINS + finer + (1 + MARGIN))


def units(shares: mx.array) -> mx.array:
    """Shares of 1 as uint32 weights, whose sums are exact in any order."""
    return (shares * UNIT + 0.5).astype(mx.uint32)


def _before(bins: mx.array, weights: mx.array, wanted: mx.array) -> tuple[mx.array, mx.array]:
    """How many of the first bins do not reach `wanted` together, and their weight, each (R, 1).
    `bins`: of each value, (R, vocab). Values in bin `BINS` are ignored."""
    rows = bins.shape[0]
    first = mx.arange(0, rows * (BINS + 1), BINS + 1)[:, None]
    at = (bins + first).reshape(-1)
    empty = mx.zeros((rows * (BINS + 1),), mx.uint32)
    found = empty.at[at].add(weights.reshape(-1)).reshape(rows, -1)[:, :BINS]
    short = mx.cumsum(found, axis=-1) < wanted
    weight = mx.sum(mx.where(short, found, 0), axis=-1, keepdims=True)
    return mx.sum(short, axis=-1, keepdims=True), weight


def _sort(values: mx.array, ids: mx.array) -> mx.array:
    order = mx.argsort(-mx.take_along_axis(values, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)


def _sample(logits: mx.array, rows: Sequence[Row], method: str) -> mx.array:
    """Tokens (R,) int32 of rows that have one method."""
    draws = COMPILED if compiles() else DRAWS
    return draws[method](logits, _columns([row.request.params for row in rows]), _keys(rows))


def _method(params: SamplingParams) -> str:
    """A key of `DRAWS`."""
    if not params.truncated:
        return "all"
    if 0 < params.top_k <= MANY:
        return "few" if params.top_k <= FEW else "many"
    return "above"


def compiles() -> bool:
    """Whether this device compiles kernels: a CPU would start a C++ compiler in mid-step."""
    return bool(mx.default_device() == mx.gpu)


def _columns(params: Sequence[SamplingParams]) -> dict[str, mx.array]:
    found = {"temperature": _column([p.temperature for p in params])}
    if any(p.top_k > 0 for p in params):
        found["top_k"] = mx.array([[p.top_k] for p in params], mx.uint32)
    if any(p.top_p < 1 for p in params):
        found["top_p"] = _column([p.top_p if p.top_p < 1 else inf for p in params])
    if any(p.min_p > 0 for p in params):  # as a distance from the highest logit
        found["min_p"] = _column([log(p.min_p) if p.min_p > 0 else -inf for p in params])
    return found


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def _best(logits: mx.array, columns: Columns, keys: mx.array, *, count: int) -> mx.array:
    """Draw among the tokens that top-k, top-p and min-p allow, from the best `count`."""
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
    """Draw among the tokens above the thresholds of top-k, top-p and min-p, or among all."""
    scaled = logits / columns["temperature"]
    highest = mx.max(scaled, axis=-1, keepdims=True)
    bounds, of_top_k = [], scaled
    if "min_p" in columns:
        bounds.append(highest + columns["min_p"])
    if "top_k" in columns:
        count = columns["top_k"]
        found = threshold(scaled, mx.ones(scaled.shape, mx.uint32), count)
        bounds.append(mx.where(count > 0, found, -inf))
        of_top_k = mx.where(scaled >= bounds[-1], scaled, -inf)
    if "top_p" in columns:
        share = columns["top_p"]
        weights = units(mx.softmax(of_top_k, axis=-1))
        found = threshold(scaled, weights, units(mx.minimum(share, 1)))
        bounds.append(mx.where(share <= 1, found, -inf))
    noisy = scaled + _noise(keys, scaled.shape[-1])
    if bounds:
        kept = (scaled >= reduce(mx.maximum, bounds)) | (scaled == highest)
        noisy = mx.where(kept, noisy, -inf)
    return mx.argmax(noisy, axis=-1).astype(mx.int32)


def _noise(keys: mx.array, count: int) -> mx.array:
    """Gumbel noise (R, count). Row i depends only on key i."""
    return mx.vmap(lambda key: mx.random.gumbel(shape=(count,), key=key))(keys)


DRAWS: Mapping[str, Draw] = {
    "all": _above,
    "few": partial(_best, count=FEW),
    "many": partial(_best, count=MANY),
    "above": _above,
}
COMPILED: Mapping[str, Draw] = {name: mx.compile(draw) for name, draw in DRAWS.items()}
