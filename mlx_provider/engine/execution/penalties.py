"""Penalties for tokens in the prompt or the reply, counted as the reply grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..request import Row


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
