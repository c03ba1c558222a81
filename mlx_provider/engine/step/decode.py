"""The pass of the rows that decode, and of a mixed chunk.

A pass is launched before the tokens of the last one are read, so that the device does not wait for
the host. Only drafts need those tokens first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ...isolation import Fault, Isolation
from ..execution.decode_batch import NO_DRAFTS, Drafts, Forward, PassResult
from ..request import Row
from ..scheduling.chunking import Chunk, StepPlan
from ..speculation.step import Place, Wanted, places
from .commit import Commit
from .draw import Rows, only
from .prefill import Prefill
from .state import State

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """Result of a pass of the rows."""

    forward: Forward
    chunk: Chunk | None
    """The mixed chunk."""
    reads: Sequence[PassResult] | None = None
    """Tokens of the last pass, unless they were read before this one was decided."""
    read_at: float = 0.0
    unreadable: Fault | None = None
    """Why those tokens cannot be read."""


class Decode:
    """Engine thread only."""

    def __init__(
        self,
        state: State,
        commit: Commit,
        rows: Rows,
        prefill: Prefill,
    ) -> None:
        self._state = state
        self._commit = commit
        self._rows = rows
        self._prefill = prefill

    def run(self, plan: StepPlan, drafts: Drafts, *, caught_up: bool) -> Decoded | None:
        """Launch the pass, and read the tokens of the last one while it runs. `caught_up`: they
        have been read."""
        state, chunk = self._state, plan.chunk if plan.mixed else None
        if not plan.rows and chunk is None:
            return None
        expected, began = state.drafting.seconds(plan, drafts), state.clock()
        along = state.batching.mixed.take_along(chunk)
        forward = state.batch.forward(along, drafts)
        load = state.scheduler.chunking.load(plan.rows, chunk)
        state.timer.launched(expected, state.clock() if caught_up else began, load)
        if drafts:
            state.drafting.waited(drafts, state.clock() - state.read_at)
        state.corrupted = {row for rows, _ in forward.failed for row in rows}
        if caught_up:
            return Decoded(forward, chunk)
        with Isolation() as reading:
            reads = state.batch.read()
            return Decoded(forward, chunk, reads, state.clock())
        return Decoded(forward, chunk, unreadable=reading.fault)

    def commit(self, decoded: Decoded | None) -> None:
        """Take the tokens that were read, and draw the next ones."""
        if decoded is None:
            return
        if decoded.unreadable is not None:
            self._rows.unreadable(decoded.unreadable)
            return
        state, forward, chunk = self._state, decoded.forward, decoded.chunk
        if decoded.reads is not None:
            self._take(decoded.reads, decoded.read_at, left=1 + len(state.behind))
        for rows, cause in forward.failed:
            left = [row for row in rows if row.finish is None]
            mixed = chunk is not None
            self._rows.pass_failed(left, cause, alone=len(rows) == 1, mixed=mixed)
        if forward.logits is not None:
            self._draw_next(forward, forward.logits)
        if chunk is not None and forward.took_chunk and chunk.due:
            chunk.job.hidden = [] if forward.chunk_hidden is None else [forward.chunk_hidden]
            self._prefill.mixed_in(chunk, forward.chunk_logits)
        state.behind = []
        state.advanced = state.clock()
        if not forward.failed:
            state.batching.passed(len(forward.rows))

    def draft(self, plan: StepPlan) -> tuple[StepPlan, Drafts, bool]:
        """If drafts pay, read the tokens of the last pass first, because drafts follow them.
        Returns the plan without what ended with these tokens, drafts, and whether any were read."""
        state = self._state
        wanted = Wanted()
        may_draft = state.drafting.allowed(plan, possible=state.batching.drafts)
        if may_draft:
            wanted = state.drafting.wanted(plan)
        if not wanted and not (plan.rows and state.batch.drafted):
            return plan, NO_DRAFTS, False
        readable, drafts = self._catch_up(), NO_DRAFTS
        if may_draft and readable:
            drafts = state.drafting.guessed(plan, wanted.asked, self._commit.fails_next)
        return state.scheduler.left_of(plan, readable=readable), drafts, True

    def _catch_up(self) -> bool:
        """Take the tokens of the last pass before the next one is launched. Returns whether that
        worked."""
        state = self._state
        with Isolation() as reading:
            found = state.batch.catch_up()
        if reading.fault is not None:
            self._rows.unreadable(reading.fault)
            return False
        state.read_at = state.clock()
        self._take(found, state.read_at, left=len(state.behind), apart=True)
        return True

    def _take(
        self, found: Sequence[PassResult], now: float, *, left: int, apart: bool = False
    ) -> None:
        """Take the result of the last pass. `left`: newer passes on the device; `apart`: row by
        row, because drafts were in it."""
        state = self._state
        guessed = any(each.drafts for each in found)
        times = state.timer.ended(now, left=left, usual=not guessed)
        state.drafting.passed(found, times)
        if not apart:
            self._commit.take([read for each in found for read in each.reads], now)
            return
        for each in found:
            self._take_result(each, now)

    def _take_result(self, result: PassResult, now: float) -> None:
        """Take what held of a row's drafts, token by token."""
        state, row = self._state, result.row
        state.drafting.held(row, result.drafts, len(result.reads) - 1)
        for stay, read in enumerate(result.reads, 1):
            if row.finish is None:
                state.batch.layout.keep(row, stay)
                self._commit.take([read], now)

    def _draw_next(self, forward: Forward, logits: mx.array) -> None:
        """Draw after every place of the rows, as if their drafts held."""
        self._state.drafting.show(forward)
        scheduler = self._state.scheduler
        wanted: Sequence[Place] = list(places(forward.rows))
        running = [row in scheduler.running and not self._replays(row) for row, _ in wanted]
        wanted, logits = only(running, wanted, logits)
        if any(row.retry_alone for row, _ in wanted):
            wanted, logits = self._rows.again(wanted, logits)
        if wanted:
            rows = list(dict.fromkeys(row for row, _ in wanted))
            with Isolation(partial(self._rows.retry, rows)):
                self._rows.launch(wanted, logits, forward.drafts)

    def _replays(self, row: Row) -> bool:
        return self._state.fixed is not None and self._state.batch.replays(row)
