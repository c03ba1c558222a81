"""Draws one token for every row in one graph, with the parameters of each row.

The draw of a row depends only on its own logits, parameters, seed and position, so it is the same
in any batch. Nothing here waits for the device, so the next step can be launched while this one
runs. The noise is Gumbel noise from a counter-based key (seed, position), so draws need no state.

Order of changes to the logits: penalties, bias, grammar mask, temperature, top-k, top-p, min-p (the
order of the logits processors of transformers 5). Logprobs are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..request import Row
from .draws import best, kind, penalised, sample


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
        for method, wanted in kinds.items():
            index = mx.array(wanted)
            tokens[index] = _sampled(changed[index], [rows[i] for i in wanted], method)
    return Drawn(tokens, _logprobs(raw, tokens, rows))


def _sampled(logits: mx.array, rows: Sequence[Row], method: str) -> mx.array:
    """Tokens (R,) of rows with one drawing method."""
    return sample(method, logits, [row.request.params for row in rows], _keys(rows))


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
            found.setdefault(kind(params), []).append(i)
    return found


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


# -- noise


def _keys(rows: Sequence[Row]) -> mx.array:
    """(R, 2) uint32: one counter-based key per row and position."""
    mixed = [_mixed(row.request.params.seed, row.index) for row in rows]
    pairs = [(n >> 32, (n + len(row.tokens)) % 2**32) for n, row in zip(mixed, rows, strict=True)]
    return mx.array(pairs, dtype=mx.uint32)


@lru_cache(maxsize=1024)
def _mixed(seed: int, choice: int) -> int:
    return _mix(_mix(seed % 2**64) ^ choice)


def _mix(x: int) -> int:
    """A bijection of 64-bit numbers in which each bit depends on all bits (splitmix64's
    finaliser)."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


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
