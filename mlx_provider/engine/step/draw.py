"""Draws the next tokens of rows, lets rows decode after their prefill, and recovers from a device
failure: rows start again, each alone until it has decoded once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ...isolation import Fault, Isolation
from ...upstream.cache_classes import whole_windows
from ..execution.decode_batch import NO_DRAFTS, DecodeBatch, Drafts, read_drawn
from ..execution.sampler import Drawn, draw
from ..request import PrefillJob, Row
from ..row_cache import grow_by
from ..speculation.step import Mask, Place, ahead
from .commit import Commit, not_kept
from .state import State

log = logging.getLogger(__name__)

LONG_PREFILL_TOKENS = 2048
"""After a longer prefill, in tokens, MLX frees its buffers: decoding uses no buffers of their
size."""


class Rows:
    """Engine thread only."""

    def __init__(self, state: State, commit: Commit) -> None:
        self._state = state
        self._commit = commit

    # -- draws

    def launch(self, places: Sequence[Place], logits: mx.array, drafts: Drafts) -> None:
        rows, batch = [row for row, _ in places], self._state.batch
        masks = [self._mask(row, at, drafts) for row, at in places]
        if self._state.fixed is None:
            drawn = [ahead(row, drafts.get(row, ()), at) for row, at in places]
            batch.drawn(rows, draw(logits, drawn, masks), drafts)
            return
        for i, row in enumerate(rows):
            batch.drawn([row], draw(logits[i : i + 1], [row], masks[i : i + 1]))

    def one(self, row: Row, logits: mx.array) -> Drawn:
        """The next token of one row, from logits (vocab,). If drawing fails, an arbitrary token."""
        mask = self._mask(row, 0)
        with self._commit.fails_next(row, "its sampling"):
            drawn = draw(logits[None], [row], [mask])
            mx.async_eval(drawn.arrays)  # type: ignore[no-untyped-call]
            return drawn
        return Drawn(mx.zeros(1, mx.int32), None)

    def _mask(self, row: Row, at: int, drafts: Drafts = NO_DRAFTS) -> Mask | None:
        """The grammar's mask after `at` of the row's drafts."""
        if row.constraint is None:
            return None
        if row in drafts:
            return row.masks[at]  # type: ignore[no-any-return]
        with self._commit.fails_next(row, "its grammar"):
            return row.constraint.mask()
        return None

    # -- after a prefill

    def whole_prompt(self, job: PrefillJob, logits: mx.array) -> None:
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
        first = self.one(row, logits)
        drawn = self.prove(row, cache, first) if row.retry_alone else first
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

    # -- after a failure

    def pass_failed(self, left: list[Row], fault: Fault, *, alone: bool, mixed: bool) -> None:
        """`left`: rows of the pass that have not ended since. `alone`: it had only one row."""
        if mixed or (left and not alone):
            self.retry(left, fault)
        elif left:
            self._commit.failed_by(left[0].request, "its decode step", fault)

    def unreadable(self, fault: Fault) -> None:
        """The tokens of the last pass cannot be read, so the caches of all rows are corrupted."""
        running = list(self._state.scheduler.running)
        self._state.corrupted = set(running)
        self.retry(running, fault)

    def retry(self, rows: Sequence[Row], fault: Fault) -> None:
        state = self._state
        log.warning(
            "a decode step of %d rows failed (%s); they are run again", len(rows), fault.summary
        )
        state.timer.forget()
        self._commit.drop(rows)
        for job in state.scheduler.retry(rows):
            self._commit.look_up(job)
        state.batching.failed()

    def prove(self, row: Row, cache: list[Any], drawn: Drawn) -> Drawn | None:
        """Decode a row of a failed step alone once. If that also fails, the row causes the
        failure."""
        state = self._state
        alone = DecodeBatch(state.model, state.batching.layout("solo"))
        alone.join(row, cache, drawn)
        with self._commit.isolated(row.request, "its decode step") as work:
            forward = alone.forward()
            if forward.logits is None:
                raise forward.failed[0][1].error
            mx.eval(forward.logits)
            read = [read for each in alone.read() for read in each.reads]
            alone.drop([row])  # its recurrent state is back in `cache`
        if work.fault is not None or forward.logits is None:
            return None
        row.retry_alone = False
        self._commit.take(read, state.clock())
        return None if row.finish is not None else self.one(row, forward.logits[0])


def only(
    wanted: Sequence[bool], places: Sequence[Place], logits: mx.array
) -> tuple[Sequence[Place], mx.array]:
    """Some of the places, and their logits (B, vocab)."""
    if all(wanted):
        return places, logits
    at = [i for i, ok in enumerate(wanted) if ok]
    return [places[i] for i in at], logits[mx.array(at)] if at else logits[:0]
