"""Draws one token for every row in one graph, with the parameters of each row.

The draw of a row depends only on its own logits, parameters, seed and position, so it is the same
in any batch. Nothing here waits for the device, so the next step can be launched while this one
runs. The noise is Gumbel noise from a counter-based key (seed, position), so draws need no state.

Order of changes to the logits: penalties, bias, grammar mask, temperature, top-k, top-p, min-p (the
order of the logits processors of transformers 5). Logprobs are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import inf, log

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..request import Row, SamplingParams
from .penalties import penalised
from .truncation import best, threshold, units

FEW, MANY = 64, 256
"""For top-k up to these values, this many best tokens are examined. Above, a threshold is
searched."""

Floats = NDArray[np.float32]
Draw = Callable[[mx.array, Sequence[SamplingParams], mx.array], mx.array]
"""(logits over temperature (R, vocab), parameters, keys (R, 2)) -> tokens (R,)."""


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
    """The next token of every row, not read back yet."""

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
    """Draw the next token of each row.

    logits: (B, vocab), any float dtype; `masks[i]`: bits of allowed tokens, (ceil(vocab/32),).
    """
    raw = logits.astype(mx.float32)
    if all(map(_plain, rows)) and all(mask is None for mask in masks):
        tokens = mx.argmax(raw, axis=-1).astype(mx.int32)
        return Drawn(tokens, _logprobs(raw, tokens, rows))
    changed = _masked(_biased(penalised(raw, rows), rows), masks)
    kinds = _kinds(rows)
    if [*map(len, kinds.values())] == [len(rows)]:  # no logits are copied, no token is replaced
        tokens = _sampled(changed, rows, *kinds)
    else:
        tokens = mx.argmax(changed, axis=-1).astype(mx.int32)
        for kind, wanted in kinds.items():
            index = mx.array(wanted)
            tokens[index] = _sampled(changed[index], [rows[i] for i in wanted], kind)
    return Drawn(tokens, _logprobs(raw, tokens, rows))


def _sampled(logits: mx.array, rows: Sequence[Row], kind: str) -> mx.array:
    """Tokens (R,) of rows with one drawing method."""
    params = [row.request.params for row in rows]
    scaled = logits / _column(p.temperature for p in params)
    return DRAWS[kind](scaled, params, _keys(rows)).astype(mx.int32)


def scored(logits: mx.array, tokens: mx.array, row: Row) -> Drawn:
    """Tokens (T,) of the row's prompt in the form of drawn tokens, with log-probabilities.

    logits: (T, vocab), before each of them.
    """
    return Drawn(tokens, _logprobs(logits.astype(mx.float32), tokens, [row] * tokens.size))


def _plain(row: Row) -> bool:
    """Whether the row is greedy and nothing changes its logits."""
    return row.request.params.plain and len(row.tokens) >= row.request.min_tokens


def _kinds(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Rows by drawing method, without greedy rows. Only their parameters decide."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        params = row.request.params
        if not params.greedy:
            found.setdefault(_kind(params), []).append(i)
    return found


def _kind(params: SamplingParams) -> str:
    if not params.truncated:
        return "all"
    if 0 < params.top_k <= MANY:
        return "few" if params.top_k <= FEW else "many"
    return "above"


# -- changes to the logits


def _biased(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Apply biases and forbidden stop tokens in one sparse scatter."""
    at_row, at_token, shift = [], [], []
    for i, row in enumerate(rows):
        for token, offset in _offsets(row).items():
            at_row.append(i)
            at_token.append(token)
            shift.append(offset)
    if not at_row:
        return logits
    return logits.at[mx.array(at_row), mx.array(at_token)].add(mx.array(shift, dtype=mx.float32))


def _offsets(row: Row) -> dict[int, float]:
    """Values to add to the logits of single tokens."""
    offsets: dict[int, float] = dict(row.request.params.logit_bias)
    if len(row.tokens) < row.request.min_tokens:
        offsets |= dict.fromkeys(row.request.stop_tokens, -np.inf)
    return offsets


def _masked(logits: mx.array, masks: Sequence[NDArray[np.uint32] | None]) -> mx.array:
    wanted = [i for i, mask in enumerate(masks) if mask is not None]
    if not wanted:
        return logits
    # one mask for the whole batch: gathering and scattering rows costs twice as much
    allowed = np.ones(logits.shape, dtype=np.bool_)
    bits = np.stack([m for m in masks if m is not None]).astype("<u4", copy=False)
    unpacked = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    allowed[wanted] = unpacked[:, : logits.shape[-1]]
    return mx.where(mx.array(allowed), logits, -mx.inf)


# -- draws


def _draw_all(scaled: mx.array, params: Sequence[SamplingParams], keys: mx.array) -> mx.array:
    """Draw from every token: (R, vocab) -> (R,)."""
    return mx.argmax(scaled + _noise(keys, scaled.shape[-1]), axis=-1)


def _draw_best(
    scaled: mx.array, params: Sequence[SamplingParams], keys: mx.array, *, count: int
) -> mx.array:
    """Draw among the best `count` tokens that top-k, top-p and min-p allow."""
    ids = best(scaled, count)
    values = mx.take_along_axis(scaled, ids, axis=-1)
    rank = mx.arange(ids.shape[-1])[None]
    kept = rank < mx.array([p.top_k for p in params])[:, None]
    # top-p uses the probability mass that top-k leaves
    probs = mx.softmax(mx.where(kept, values, -mx.inf), axis=-1)
    before = mx.cumsum(probs, axis=-1) - probs
    kept = kept & (before < _column(p.top_p for p in params))
    kept = kept & (values - values[:, :1] >= _floor(params))
    kept = kept | (rank == 0)
    noisy = mx.where(kept, values + _noise(keys, count)[:, : ids.shape[-1]], -mx.inf)
    return mx.take_along_axis(ids, mx.argmax(noisy, axis=-1, keepdims=True), axis=-1)[:, 0]


def _draw_above(scaled: mx.array, params: Sequence[SamplingParams], keys: mx.array) -> mx.array:
    """Draw among the tokens above the logit threshold of top-k, top-p and min-p."""
    highest = mx.max(scaled, axis=-1, keepdims=True)
    bounds, kept = [], scaled
    if any(p.min_p > 0 for p in params):
        bounds.append(highest + _floor(params))
    if any(p.top_k > 0 for p in params):
        vocab = scaled.shape[-1]
        wanted = mx.array([[p.top_k if p.top_k > 0 else vocab] for p in params], mx.uint32)
        bounds.append(threshold(scaled, mx.ones(scaled.shape, mx.uint32), wanted))
        kept = mx.where(scaled >= bounds[-1], scaled, -mx.inf)
    if any(p.top_p < 1 for p in params):
        share = _column(p.top_p for p in params)
        found = threshold(scaled, units(mx.softmax(kept, axis=-1)), units(share))
        bounds.append(mx.where(share < 1, found, -mx.inf))
    kept = (scaled >= reduce(mx.maximum, bounds)) | (scaled == highest)
    return mx.argmax(mx.where(kept, scaled + _noise(keys, scaled.shape[-1]), -mx.inf), axis=-1)


DRAWS: dict[str, Draw] = {
    "all": _draw_all,
    "few": partial(_draw_best, count=FEW),
    "many": partial(_draw_best, count=MANY),
    "above": _draw_above,
}


def _floor(params: Sequence[SamplingParams]) -> mx.array:
    """The logit distance from the maximum that min-p allows, (R, 1)."""
    return _column(log(p.min_p) if p.min_p > 0 else -inf for p in params)


def _noise(keys: mx.array, count: int) -> mx.array:
    """Gumbel noise (R, count). Row i depends only on key i."""
    return mx.vmap(lambda key: mx.random.gumbel(shape=(count,), key=key))(keys)


def _keys(rows: Sequence[Row]) -> mx.array:
    """(R, 2) uint32: one counter-based key per row and position."""
    pairs = [_key(r.request.params.seed, r.index, len(r.tokens)) for r in rows]
    return mx.array(np.array(pairs, dtype=np.uint32))


def _key(seed: int, choice: int, position: int) -> tuple[int, int]:
    mixed = _mix(_mix(seed % 2**64) ^ choice)
    return mixed >> 32, (mixed + position) % 2**32


def _mix(x: int) -> int:
    """A bijection of 64-bit numbers in which each bit depends on all bits (splitmix64's
    finaliser)."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


# -- logprobs


def _logprobs(raw: mx.array, tokens: mx.array, rows: Sequence[Row]) -> Logprobs | None:
    wanted = [i for i, row in enumerate(rows) if row.request.logprobs is not None]
    if not wanted:
        return None
    index = mx.array(wanted)
    own = raw[index]
    own = own - mx.logsumexp(own, axis=-1, keepdims=True)
    counts = [rows[i].request.logprobs or 0 for i in wanted]
    top_ids = best(own, max(1, *counts))
    return Logprobs(
        indices=wanted,
        counts=counts,
        drawn=mx.take_along_axis(own, tokens[index][:, None], axis=-1)[:, 0],
        top_ids=top_ids,
        top=mx.take_along_axis(own, top_ids, axis=-1),
    )
