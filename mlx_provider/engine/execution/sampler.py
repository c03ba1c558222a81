"""Draw one token for every row in one graph, each row by its own parameters.

A row's draw depends on its own logits, parameters, seed and position alone: the same in any
company. Three kinds of rows share the graph: greedy rows take the maximum; truncated rows
(top-k, top-p, min-p) draw among their best candidates; the rest draw from every token. Noise
is Gumbel noise from a counter-based key (seed, position), so draws need no state.

Order of changes to the logits: bias and penalties, grammar mask, temperature, top-k, top-p,
min-p (as transformers 5 orders its logits processors). Logprobs are those of the raw logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..request import Row, SamplingParams

CANDIDATES = 256
"""Best tokens that a truncated row looks at before it falls back to sorting the vocabulary."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Logprobs:
    """Raw log-probabilities for the rows that ask; row i of the arrays is `rows[i]`."""

    rows: list[Row]
    drawn: mx.array
    """(R,) of the drawn token."""
    top_ids: mx.array
    """(R, K) best first."""
    top: mx.array
    """(R, K)."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """The next token of every row, not yet read back."""

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
    changed = _masked(_adjusted(raw, rows), masks)
    tokens = mx.argmax(changed, axis=-1).astype(mx.int32)
    for kind in (_draw_candidates, _draw_all):
        wanted = [i for i, row in enumerate(rows) if _kind(row.request.params) is kind]
        if wanted:
            index = mx.array(wanted)
            params = [rows[i].request.params for i in wanted]
            keys = _keys([rows[i] for i in wanted])
            chosen = kind(changed[index] / _column(p.temperature for p in params), params, keys)
            tokens[index] = chosen.astype(mx.int32)
    return Drawn(tokens, _logprobs(raw, tokens, rows))


def _plain(row: Row) -> bool:
    """Greedy, with nothing that changes its logits."""
    return row.request.params.plain and len(row.tokens) >= row.request.min_tokens


def _kind(params: SamplingParams) -> object:
    if params.greedy:
        return None
    return _draw_candidates if params.truncated else _draw_all


# -- changes to the logits


def _adjusted(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Bias, penalties and forbidden stop tokens: sparse changes, one scatter."""
    at_row, at_token, scale, shift = [], [], [], []
    for i, row in enumerate(rows):
        for token, (factor, offset) in _changes(row).items():
            at_row.append(i)
            at_token.append(token)
            scale.append(factor)
            shift.append(offset)
    if not at_row:
        return logits
    r, t = mx.array(at_row), mx.array(at_token)
    divide, add = mx.array(scale, dtype=mx.float32), mx.array(shift, dtype=mx.float32)
    old = logits[r, t]
    new = mx.where(old > 0, old / divide, old * divide) + add
    return logits.at[r, t].add(mx.where(add == -mx.inf, -mx.inf, new - old))


def _changes(row: Row) -> dict[int, tuple[float, float]]:
    """(divisor of a positive logit, addend) by token."""
    params = row.request.params
    changes: dict[int, tuple[float, float]] = {}
    if params.repetition_penalty != 1:
        for token in {*row.request.prompt.tokens, *row.tokens}:
            changes[token] = (params.repetition_penalty, 0.0)
    if params.presence_penalty or params.frequency_penalty:
        for token, count in Counter(row.tokens).items():
            factor, _ = changes.get(token, (1.0, 0.0))
            penalty = params.presence_penalty + params.frequency_penalty * count
            changes[token] = (factor, -penalty)
    for token, bias in params.logit_bias:
        factor, offset = changes.get(token, (1.0, 0.0))
        changes[token] = (factor, offset + bias)
    if len(row.tokens) < row.request.min_tokens:
        changes |= dict.fromkeys(row.request.stop_tokens, (1.0, -np.inf))
    return changes


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


def _draw_candidates(
    scaled: mx.array, params: Sequence[SamplingParams], keys: mx.array
) -> mx.array:
    """Draw among the tokens that top-k, top-p and min-p leave: (R, vocab) -> (R,).

    The candidates hold everything that may be drawn unless the kept mass reaches beyond them;
    only then, which a read-back decides per row, is that row's whole vocabulary sorted.
    """
    vocab = scaled.shape[-1]
    total = mx.logsumexp(scaled, axis=-1, keepdims=True)
    chosen, enough = _draw_best(scaled, total, params, keys, min(CANDIDATES, vocab))
    if vocab <= CANDIDATES:
        return chosen
    short: list[int] = np.flatnonzero(~np.array(enough)).tolist()
    if short:
        index = mx.array(short)
        whole, _ = _draw_best(
            scaled[index], total[index], [params[i] for i in short], keys[index], vocab
        )
        chosen[index] = whole
    return chosen


def _draw_best(
    scaled: mx.array, total: mx.array, params: Sequence[SamplingParams], keys: mx.array, count: int
) -> tuple[mx.array, mx.array]:
    """Draw among the best `count` tokens; and whether nothing beyond them could be drawn."""
    vocab = scaled.shape[-1]
    ids = (
        mx.argsort(-scaled, axis=-1)
        if count == vocab
        else _sorted_by(scaled, mx.argpartition(-scaled, count - 1, axis=-1)[:, :count])
    )
    values = mx.take_along_axis(scaled, ids, axis=-1)
    rank = mx.arange(count)[None]
    top_k = mx.array([p.top_k if p.top_k > 0 else vocab for p in params])[:, None]
    kept = rank < top_k
    # top-p counts the mass that top-k leaves
    within = mx.where(kept, values, -mx.inf)
    whole = mx.where(top_k < count, mx.logsumexp(within, axis=-1, keepdims=True), total)
    probs = mx.exp(within - whole)
    before = mx.cumsum(probs, axis=-1) - probs
    kept = kept & (before < _column(p.top_p for p in params))
    floor = mx.log(mx.maximum(_column(p.min_p for p in params), 1e-45))
    kept = kept & (values - values[:, :1] >= floor)
    kept = kept | (rank == 0)
    noisy = mx.where(kept, values + _noise(keys, count), -mx.inf)
    chosen = mx.take_along_axis(ids, mx.argmax(noisy, axis=-1, keepdims=True), axis=-1)[:, 0]
    return chosen, ~kept[:, -1]


def _sorted_by(scaled: mx.array, ids: mx.array) -> mx.array:
    order = mx.argsort(-mx.take_along_axis(scaled, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)


def _noise(keys: mx.array, count: int) -> mx.array:
    """Gumbel noise (R, count), row i from key i alone."""
    return mx.vmap(lambda key: mx.random.gumbel(shape=(count,), key=key))(keys)


def _keys(rows: Sequence[Row]) -> mx.array:
    """(R, 2) uint32: one counter-based key per row and position."""
    pairs = [_key(r.request.params.seed, r.index, len(r.tokens)) for r in rows]
    return mx.array(np.array(pairs, dtype=np.uint32))


def _key(seed: int, choice: int, position: int) -> tuple[int, int]:
    mixed = _mix(_mix(seed % 2**64) ^ choice)
    return mixed >> 32, (mixed + position) % 2**32


def _mix(x: int) -> int:
    """A bijection of 64-bit numbers whose bits all depend on all bits (splitmix64's finaliser)."""
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
    count = max(1, *(rows[i].request.logprobs or 0 for i in wanted))
    top_ids = _sorted_by(own, mx.argpartition(-own, count - 1, axis=-1)[:, :count])
    return Logprobs(
        rows=[rows[i] for i in wanted],
        drawn=mx.take_along_axis(own, tokens[index][:, None], axis=-1)[:, 0],
        top_ids=top_ids,
        top=mx.take_along_axis(own, top_ids, axis=-1),
    )
