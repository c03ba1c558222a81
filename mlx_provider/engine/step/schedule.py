"""Decides all of a step before any of it runs.

What changes memory comes first: requests end at their deadlines, rows that have outgrown the memory
give up their place, one prompt is let in. Then the plan is made, and drafts are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import inf

from ...errors import RequestTimedOut
from ..execution.decode_batch import NO_DRAFTS, Drafts
from ..request import Phase, PrefillJob, Request, Row
from ..scheduling.plan import StepPlan
from .commit import Commit
from .decode import Decode
from .record import StepRecord
from .start import Start
from .state import State


class Schedule:
    """Every method belongs to the engine thread."""

    def __init__(self, state: State, commit: Commit, start: Start, decode: Decode) -> None:
        self._state = state
        self._commit = commit
        self._start = start
        self._decode = decode
        self._decoded = False
        """Rows have decoded since memory was last made for them."""
        self._next_deadline = inf
        """No request can expire before this time."""

    def queued(self, request: Request) -> None:
        """A request has come; it may have a deadline."""
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def record(self) -> StepRecord:
        """The next step."""
        state = self._state
        state.decisions.step()
        now = state.clock()
        self._expire(now)
        preempted, cut = self._make_room()
        admitted = self._admit(now)
        plan, wanted = self._plan(now)
        self._decoded = bool(plan.rows)
        drafts, caught_up = NO_DRAFTS, bool(wanted) or (bool(plan.rows) and state.batch.drafted)
        if caught_up:
            readable = self._decode.catch_up()
            drafts = self._guess(wanted) if wanted and readable else NO_DRAFTS
            plan = self._as_it_stands(plan, readable=readable)
        ended, state.ended = tuple(state.ended), []
        reclaimed, state.scheduler.reclaimed = state.scheduler.reclaimed, 0
        return StepRecord(now, plan, ended, cut, preempted, admitted, reclaimed, drafts, caught_up)

    def _expire(self, now: float) -> None:
        if now <= self._next_deadline:
            return
        live = [r for r in self._state.scheduler.requests() if r.deadline is not None]
        for request in live:
            if request.deadline is not None and now > request.deadline:
                error = RequestTimedOut("the request's time limit has passed")
                self._commit.fail(request, error)
        self._next_deadline = min(
            (r.deadline for r in live if r.deadline and r.phase is not Phase.DONE), default=inf
        )

    def _make_room(self) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """Of rows that have outgrown the memory the youngest waits, or ends where it could never
        go on; those that wait and those that end."""
        preempted: list[Row] = []
        cut: list[Row] = []
        while self._decoded and (found := self._overflowing()) is not None:
            row, may_wait = found
            if may_wait:
                preempted.append(row)
                self._commit.keep(row.request, [row])
                self._commit.drop([row])
                self._start.look_up(self._state.scheduler.preempt(row))
            else:
                cut.append(row)
                self._commit.finish(row, "length")
        return tuple(preempted), tuple(cut)

    def _overflowing(self) -> tuple[Row, bool] | None:
        """A row that has outgrown the memory, and whether it can go on later."""
        return self._state.decisions.overflowing(self._state.scheduler.overflowing)

    def _admit(self, now: float) -> PrefillJob | None:
        """Let one more prompt in, and give a cache to each that was let in and has none."""
        state, scheduler = self._state, self._state.scheduler
        admitted = state.decisions.admitted(partial(scheduler.admit, now))
        for job in [j for j in scheduler.waiting if j.admitted and j.cache is None]:
            state.output.started(job.request)
            with self._commit.isolated(job.request, "its prefill"):
                self._start.begin(job)
        return admitted

    def _plan(self, now: float) -> tuple[StepPlan, Mapping[Row, int]]:
        """What the step runs; the number of drafts that are wanted for each row."""
        return self._state.decisions.plan(partial(self._own_plan, now))

    def _own_plan(self, now: float) -> tuple[StepPlan, dict[Row, int]]:
        state = self._state
        plan = state.scheduler.plan(
            now,
            mixes=state.batching.mixes,
            stalled=now - state.advanced + sum(state.behind),
            passes=state.batch.passes,
        )
        possible = state.batching.drafts
        return plan, state.drafting.wanted(plan, possible=possible) if plan.rows else {}

    def _guess(self, wanted: Mapping[Row, int]) -> Drafts:
        """Tokens that may follow."""
        own = partial(self._state.drafting.guessed, wanted, self._commit.isolated)
        return self._state.decisions.drafts(own)

    def _as_it_stands(self, plan: StepPlan, *, readable: bool) -> StepPlan:
        """The plan without what ended with the tokens that were read after it was made."""
        rows = tuple(row for row in plan.rows if row in self._state.scheduler.running)
        if plan.chunk is None or (plan.chunk.due and (readable or not plan.mixed)):
            return replace(plan, rows=rows)
        return replace(plan, rows=rows, chunk=None, mixed=False)
