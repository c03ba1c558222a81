"""Makes a step's plan before its passes run. It changes rows and caches on the way: requests end at
their deadlines, rows that have outgrown the memory are preempted, one prompt is admitted and gets
its cache. Then the rows and the chunk are chosen. If there may be drafts, the tokens of the last
pass are read first, because drafts follow them."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ...errors import RequestTimedOut
from ..execution.decode_batch import NO_DRAFTS
from ..request import Phase, PrefillJob, Request, Row
from ..scheduling.chunking import StepPlan
from ..speculation.step import Wanted
from .commit import Commit
from .decode import Decode
from .state import State, StepRecord


class Schedule:
    """Engine thread only."""

    def __init__(self, state: State, commit: Commit, decode: Decode) -> None:
        self._state = state
        self._commit = commit
        self._decode = decode
        self._decoded = False
        """Rows have decoded since memory was last checked."""
        self._next_deadline = inf
        """No request can expire before this time."""

    def queued(self, request: Request) -> None:
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def record(self) -> StepRecord:
        state = self._state
        now = state.clock()
        self._expire(now)
        preempted, cut = self._make_room(now)
        admitted = self._admit(now)
        plan = self._plan(now)
        self._decoded = bool(plan.rows)
        may_draft = state.drafting.allowed(plan, possible=state.batching.drafts)
        wanted = state.drafting.wanted(plan) if may_draft else Wanted()
        drafts = NO_DRAFTS
        caught_up = bool(wanted) or (bool(plan.rows) and bool(state.batch.drafted))
        if caught_up:
            readable = self._decode.catch_up()
            if may_draft and readable:
                drafts = state.drafting.guessed(plan, wanted.asked, self._commit.fails_next)
            plan = self._as_it_stands(plan, readable=readable)
        state.scheduler.ran(plan)
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

    def _make_room(self, now: float) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """If rows have outgrown the memory, the youngest waits, or ends if it could never continue.
        Rows also wait for another account. Returns the rows that wait and the rows that end."""
        preempted: list[Row] = []
        cut: list[Row] = []
        while self._decoded and (found := self._state.scheduler.overflowing()) is not None:
            row, may_wait = found
            (preempted if may_wait else cut).append(row)
            (self._preempt if may_wait else self._commit.cut)(row)
        for row in self._state.scheduler.displaced(now):
            preempted.append(row)
            self._preempt(row)
        return tuple(preempted), tuple(cut)

    def _preempt(self, row: Row) -> None:
        self._commit.keep(row.request, [row])
        self._commit.drop([row])
        self._commit.look_up(self._state.scheduler.preempt(row))

    def _admit(self, now: float) -> PrefillJob | None:
        admitted = self._state.scheduler.admit(now)
        self._begin()
        return admitted

    def _begin(self) -> None:
        """Give a cache to each admitted prompt without one."""
        ready = [j for j in self._state.scheduler.waiting if j.admitted and not j.restoring]
        for job in [j for j in ready if j.cache is None]:
            self._state.output.started(job.request)
            with self._commit.isolated(job.request, "its prefill"):
                self._commit.begin(job)

    def _plan(self, now: float) -> StepPlan:
        state = self._state
        return state.scheduler.plan(
            now,
            mixes=state.batching.mixes,
            stalled=now - state.advanced + sum(state.behind),
            passes=state.batch.passes,
        )

    def _as_it_stands(self, plan: StepPlan, *, readable: bool) -> StepPlan:
        """The plan without rows and chunks that ended with the tokens that were read after it was
        made."""
        scheduler = self._state.scheduler
        rows = tuple(row for row in plan.rows if row in scheduler.running)
        if plan.embedded not in scheduler.waiting:
            plan = replace(plan, embedded=None)
        if plan.chunk is None or (plan.chunk.due and (readable or not plan.mixed)):
            return replace(plan, rows=rows)
        return replace(plan, rows=rows, chunk=None, mixed=False)
