"""Draws the first tokens after a prefill, and lets the rows decode."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...upstream.sparse_cache import whole_windows
from ..execution.decode_batch import read_drawn
from ..execution.sampler import Drawn
from ..request import PrefillJob, Row
from ..row_cache import grow_by
from ..speculation.step import Place
from .commit import Commit, not_kept
from .draw import Draws, only
from .recovery import Recovery
from .state import State

LONG_PREFILL_TOKENS = 2048
"""After a longer prefill, in tokens, MLX frees its buffers: decoding uses no buffers of their
size."""


class Join:
    """Every method belongs to the engine thread."""

    def __init__(self, state: State, commit: Commit, draws: Draws, recovery: Recovery) -> None:
        self._state = state
        self._commit = commit
        self._draws = draws
        self._recovery = recovery

    def whole_prompt(self, job: PrefillJob, logits: mx.array) -> None:
        """Draw the first tokens from logits (vocab,) and let the rows of a prompt decode."""
        state = self._state
        if not state.scheduler.running:
            state.advanced = state.clock()
        job.request.features = {}
        for span in job.request.prompt.spans:
            if span.ready is not None:
                span.ready.drop()
        if state.prefix_cache is not None:
            with Isolation(partial(not_kept, job.request)):
                state.prefix_cache.keep_prefill(job)
        if job.request.prefilled >= LONG_PREFILL_TOKENS:
            mx.clear_cache()
        cache, job.cache = job.held(), None
        if job.places is not None:
            cache = whole_windows(cache)
        grow_by(cache, state.scheduler.admission.kv_growth(job))
        state.scheduler.join(job)
        if state.prefix_cache is not None:
            caches = state.prefix_cache.fork(job.rows, cache)
        else:
            caches = [cache, *(copy.deepcopy(cache) for _ in job.rows[1:])]
        for row, own in zip(job.rows, caches, strict=True):
            if row.held > len(job.tokens):
                state.scheduler.decode(row)
                state.batch.join_again(row, own)
            else:
                self._row(row, own, logits)
                state.drafting.begin(row, job)

    def again(self, wanted: Sequence[Place], logits: mx.array) -> tuple[Sequence[Place], mx.array]:
        """Let rows of a failed step join if their committed tokens are in the cache again. Returns
        the others."""
        suspect, batch = [row.retry_alone for row, _ in wanted], self._state.batch
        for (row, _), own in zip(*only(suspect, wanted, logits), strict=True):
            cache = batch.layout.extract(row)
            batch.drop([row])
            self._state.scheduler.leave([row])
            self._row(row, cache, own)
        return only([not each for each in suspect], wanted, logits)

    def _row(self, row: Row, cache: list[Any], logits: mx.array) -> None:
        if row.finish is not None:  # another choice of its request has failed
            return
        first = self._draws.one(row, logits)
        drawn = self._recovery.prove(row, cache, first) if row.retry_alone else first
        if drawn is not None and self._first_token(row, drawn):
            self._state.scheduler.decode(row)
            self._state.batch.join(row, cache, drawn, committed=True)

    def _first_token(self, row: Row, drawn: Drawn) -> bool:
        """Take a token one step before the row joins. Returns whether the row continues."""
        with self._commit.isolated(row.request, "its sampling") as work:
            read = read_drawn(drawn, {row: 0})
        if work.fault is not None:
            return False
        self._commit.take(read, self._state.clock())
        return row.finish is None
