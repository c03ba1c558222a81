"""One model's engine: its queue, and the step, which decides, runs and commits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from ..errors import MLXProviderError, RequestTimedOut
from ..records import LoadedModel
from .agreement import ALONE, Agreement
from .execution.batching import Batching
from .execution.decode_batch import NO_DRAFTS, DecodeBatch, Drafts
from .feature_cache import FeatureCache
from .fixed_shapes import FixedShapes
from .prefix_cache.policy import PrefixCachePolicy
from .recent import Recent, Step
from .request import Phase, Request, Row
from .request_log import Recorder
from .scheduling.pass_timer import PassTimer
from .scheduling.plan import StepPlan
from .scheduling.scheduler import Scheduler
from .sparse_prefill.sparse_prefill import SparsePrefill
from .speculation.speculation import Speculation
from .speculation.step import DraftStep
from .step.commit import Commit
from .step.decode import Decode
from .step.draw import Draws
from .step.join import Join
from .step.prefill import Prefill
from .step.record import StepRecord
from .step.recovery import Recovery
from .step.start import Start
from .step.state import State
from .step_output import Post, StepOutput
from .token_names import TokenNames
from .told import Names, request_told
from .unlike import Unlike


class Engine:
    """Runs requests of one model. Every method belongs to the engine thread."""

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        *,
        layout: str,
        mixes: bool = False,
        fixed: FixedShapes | None = None,
        make_cache: Callable[[], list[Any]],
        recorder: Recorder,
        prefix_cache: PrefixCachePolicy | None = None,
        features: FeatureCache | None = None,
        speculation: Speculation | None = None,
        sparse_prefill: SparsePrefill | None = None,
        agreed: Agreement = ALONE,
        unlike: Unlike | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layout`, `mixes`: what the probe found; `fixed`: what passes look like instead;
        `agreed`: with the other ranks, where the model is split over several; `unlike`: they keep
        unlike parts of a row."""
        self.model = model
        self.scheduler = scheduler
        self.recorder = recorder
        self.prefix_cache = prefix_cache
        self.sparse_prefill = sparse_prefill
        self.recent = Recent()
        self.state = state = State(
            model=model,
            scheduler=scheduler,
            make_cache=make_cache,
            recorder=recorder,
            clock=clock,
            output=StepOutput(recorder, clock),
            batching=Batching(model, layout, mixes=mixes, fixed=fixed, joining=unlike),
            drafting=DraftStep(speculation, scheduler, recorder, self.recent),
            timer=PassTimer(scheduler.costs),
            recent=self.recent,
            token_names=TokenNames(model.tokenizer),
            features=features or FeatureCache(0),
            prefix_cache=prefix_cache,
            sparse_prefill=sparse_prefill,
            fixed=fixed,
            agreed=agreed,
        )
        self.features = state.features
        state.batch.shows_hidden = state.drafting.shows_hidden
        self._named = Names(scheduler)
        self._next_deadline = inf
        """No request can expire before this time."""
        self._start = Start(state)
        self._commit = Commit(state)
        draws = Draws(state, self._commit)
        recovery = Recovery(state, self._commit, self._start, draws)
        join = Join(state, self._commit, draws, recovery)
        self._prefill = Prefill(state, self._commit, join)
        self._decode = Decode(state, self._commit, draws, join, self._prefill, recovery)

    @property
    def batch(self) -> DecodeBatch:
        """The rows that decode."""
        return self.state.batch

    @property
    def mixes(self) -> bool:
        """Whether chunks of prompts may share the pass of rows that decode."""
        return self.state.batching.mixes

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and every event has been handed out."""
        return self.scheduler.idle and self.state.output.empty

    # -- requests

    def submit(self, request: Request) -> None:
        """Queue a request that passed the scheduler's `check`."""
        if request.phase is Phase.DONE:
            return  # cancelled before it arrived
        self.state.agreed.tell("submit", partial(request_told, request))
        self._start.look_up(self.scheduler.submit(request, self.state.clock()))
        self.recorder.request_queued()
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def cancel(self, request: Request) -> None:
        """End a request wherever it is. What it held is free at once."""
        self._commit.cancel(request)

    def fail(self, request: Request, error: MLXProviderError) -> None:
        """End a request with an error that its reader sees."""
        self._commit.fail(request, error)

    # -- the step

    def step(self) -> list[Post]:
        """Advance every row by one token and one prompt by one chunk; what readers get."""
        self.state.agreed.tell("step", dict)
        self._expire()
        self._admit()
        now, named = self.state.clock(), self._named
        own = partial(self._decided, now)
        plan, wanted = self.state.agreed.on("plan", own, named.step_told, named.step_heard)
        if plan.rows:
            self._run_rows(plan, wanted)
            self._make_room()
        if plan.chunk is not None and not plan.mixed and plan.chunk.due:
            self._prefill.run(plan.chunk, plan)
        if plan.scored is not None:
            self._prefill.score(plan.scored, plan.scoring_seconds)
        if plan.rows or plan.chunk is not None:
            self._ran(plan, now)
        return self.state.output.take()

    def _run_rows(self, plan: StepPlan, wanted: dict[Row, int]) -> None:
        """One token for every row, or several, and a chunk that is mixed into their pass."""
        caught_up = bool(wanted) or self.batch.drafted
        if caught_up and not self._decode.catch_up():
            return
        drafts = self._guessed(wanted) if wanted else NO_DRAFTS
        if plan.mixed and plan.chunk is not None and not plan.chunk.due:
            plan = replace(plan, chunk=None, mixed=False)
        decoded = self._decode.run(StepRecord(plan, drafts, caught_up))
        self._decode.commit(decoded, caught_up=caught_up)

    def _decided(self, now: float) -> tuple[StepPlan, dict[Row, int]]:
        """What a step does; for whom drafts are worth it in it, and how many."""
        state = self.state
        plan = self.scheduler.plan(
            now,
            mixes=self.mixes,
            stalled=now - state.advanced + sum(state.behind),
            passes=self.batch.passes,
        )
        possible = state.batching.drafts
        wanted = state.drafting.wanted(plan, possible=possible) if plan.rows else {}
        return plan, wanted

    def _guessed(self, wanted: dict[Row, int]) -> Drafts:
        """What rows may say next."""
        own = partial(self.state.drafting.guessed, wanted, self._commit.isolated)
        named = self._named
        return self.state.agreed.on("guessed", own, named.drafts_told, named.drafts_heard)

    def _ran(self, plan: StepPlan, began: float) -> None:
        """Remember a step for statistics."""
        ended, chunk = self.state.clock(), plan.chunk.size if plan.chunk is not None else 0
        decoded = self.state.output.decoded
        step = Step(ended, ended - began, len(plan.rows), decoded, chunk, plan.mixed)
        self.recent.steps.add(step)
        self.recorder.step(step.seconds, chunk, mixed=plan.mixed)

    def _expire(self) -> None:
        now = self.state.clock()
        if now <= self._next_deadline:
            return
        live = [r for r in self.scheduler.requests() if r.deadline is not None]
        for request in live:
            if request.deadline is not None and now > request.deadline:
                self.fail(request, RequestTimedOut("the request's time limit has passed"))
        self._next_deadline = min(
            (r.deadline for r in live if r.deadline and r.phase is not Phase.DONE), default=inf
        )

    def _admit(self) -> None:
        """Let one more prompt in, and give a cache to each that was let in and has none."""
        named, state = self._named, self.state
        state.agreed.on(
            "admitted",
            lambda: self.scheduler.admit(state.clock()),
            named.job_told,
            lambda told: self.scheduler.let_in(named.job_heard(told)),
        )
        for job in [j for j in self.scheduler.waiting if j.admitted and j.cache is None]:
            state.output.started(job.request)
            with self._commit.isolated(job.request, "its prefill"):
                self._start.begin(job)

    def _make_room(self) -> None:
        """Rows that have outgrown the memory: the youngest waits; what could not go on ends."""
        while (found := self._overflowing()) is not None:
            row, may_wait = found
            if not may_wait:
                self._commit.finish(row, "length")
                continue
            self._commit.keep(row.request, [row])
            self._commit.drop([row])
            self._start.look_up(self.scheduler.preempt(row))

    def _overflowing(self) -> tuple[Row, bool] | None:
        """A row that has outgrown the memory, and whether it can go on later."""
        agreed, named = self.state.agreed, self._named
        row = agreed.on("overflowing", self.scheduler.overflowing, named.row_told, named.row_heard)
        if row is None:
            return None
        return row, agreed.on("may wait", partial(self.scheduler.may_wait, row), bool, bool)
