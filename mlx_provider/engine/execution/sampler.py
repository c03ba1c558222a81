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
"""Tokens of one block. The best tokens are in the blocks with the highest maxima."""
BINS = 1024
"""Intervals of the range of logits, and of the interval that is looked at again. Values within one
of those count as equal."""
UNIT = 2.0**31
"""Sum of the weights for shares."""
MARGIN = 0.25
"""Share of an interval by which rounding may move a value. Those that are so near count, too."""
LEAST_SPAN = 1e-6
RANGE = 30.0
"""Logit distance from the maximum beyond which probabilities do not matter."""
FEW, MANY = 64, 256
"""For top-k up to these values, so many best tokens are examined. Above, a threshold is found."""
Columns = Mapping[str, mx.array]
"""Parameters of the rows, each (R, 1). A row without a parameter has a value that changes nothing,
so that it draws the same beside others."""
Draw = Callable[[mx.array, Columns, mx.array], mx.array]
"""(logits (R, vocab), parameters, keys (R, 2)) -> tokens (R,) int32."""


@dataclass(frozen=True)
class Logprobs:
    """Raw log-probabilities for the rows that want them. Row i of the arrays belongs to the drawn
    token `indices[i]`."""

    indices: list[int]
    counts: list[int]
    """Number of alternatives that each row wants."""
    drawn: mx.array
    """(R,) of the drawn token."""
    top_ids: mx.array
    """(R, K) best first."""
    top: mx.array
    """(R, K)."""


@dataclass(frozen=True, eq=False)
class Drawn:
    tokens: mx.array
    """(B,) int32."""
    logprobs: Logprobs | None

    @property
    def arrays(self) -> list[mx.array]:
        asked = self.logprobs
        return [self.tokens, *([asked.drawn, asked.top_ids, asked.top] if asked else [])]


def draw(
    logits: mx.array, rows: Sequence[Row], masks: Sequence[NDArray[np.uint32] | None]
) -> Drawn:
    """Draw the next token of each row. logits: (B, vocab), any float dtype; `masks[i]`: bits of
    allowed tokens, (ceil(vocab/32),)."""
    raw = logits.astype(mx.float32)
    unchanged = all(r.request.params.plain and len(r.tokens) >= r.request.min_tokens for r in rows)
    if unchanged and all(mask is None for mask in masks):
        tokens = mx.argmax(raw, axis=-1).astype(mx.int32)
        return Drawn(tokens, _logprobs(raw, tokens, rows))
    changed = _mask(_bias(apply_penalties(raw, rows), rows), masks)
    kinds: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if not row.request.params.greedy:
            kinds.setdefault(_method(row.request.params), []).append(i)
    if [*map(len, kinds.values())] == [len(rows)]:  # no logits are copied, no token is replaced
        tokens = _sample(changed, rows, *kinds)
    else:
        tokens = mx.argmax(changed, axis=-1).astype(mx.int32)
        for method, wanted in kinds.items():
            index = mx.array(wanted)
            tokens[index] = _sample(changed[index], [rows[i] for i in wanted], method)
    return Drawn(tokens, _logprobs(raw, tokens, rows))


def score(logits: mx.array, tokens: mx.array, row: Row) -> Drawn:
    """Tokens (T,) of the row's prompt in the form of drawn tokens, with log-probabilities. logits:
    (T, vocab), before each of them."""
    return Drawn(tokens, _logprobs(logits.astype(mx.float32), tokens, [row] * tokens.size))


def _bias(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Add biases, and forbid stop tokens, in one sparse scatter."""
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
    in_prompt: mx.array
    """(vocab,) bool."""
    counts: mx.array
    """(vocab,) int32: the number of times that each token is in the reply."""
    taken: int = 0
    """Tokens of the reply that are counted."""


def apply_penalties(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """(B, vocab) with the penalties of the rows that have any."""
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
    changed = logits + 0  # the input must not change
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
    """The highest value at and above which the weights sum up to `wanted`, a (R, 1): (R, vocab) ->
    (R, 1). Weights and sums are uint32. Nothing is read back. If there is no such value: the lowest
    value that counts."""
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
    """Among the tokens above the logit threshold of top-k, top-p and min-p, or all."""
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
