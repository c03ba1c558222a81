"""One model's engine: its queue, and the step, which decides, runs and commits."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from math import inf
from typing import Any

from ..errors import MLXProviderError, RequestTimedOut
from ..isolation import Isolation
from ..records import LoadedModel
from .execution.batching import Batching
from .execution.decode_batch import DecodeBatch
from .inputs import FeatureCache
from .prefix_cache.policy import PrefixCachePolicy
from .request import Phase, PrefillJob, Request, Row
from .scheduling.chunking import StepPlan
from .scheduling.costs import PassTimer
from .scheduling.record import Start, StepRecord
from .scheduling.scheduler import Scheduler
from .sizes import FixedShapes
from .sparse_prefill import SparsePrefill
from .speculation.speculation import Speculation
from .speculation.step import DraftStep
from .step.commit import Commit
from .step.decode import Decode
from .step.prefill import Prefill
from .step_output import Post, Recent, Recorder, Step, StepOutput, TokenNames

RESTORING_REST = 0.05
"""Longest seconds between checks of deadlines while the engine waits only for the disk."""


class Engine:
    """Engine thread only."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layout`, `mixes`: results of the probe; `fixed` replaces them."""
        self.model = model
        self.scheduler = scheduler
        self.make_cache = make_cache
        self.recorder = recorder
        self.clock = clock
        self.output = StepOutput(recorder, clock)
        self.recent = Recent()
        self.batching = Batching(model, layout, mixes=mixes, fixed=fixed)
        self.drafting = DraftStep(speculation, scheduler, recorder, self.recent)
        self.timer = PassTimer(scheduler.costs)
        self.token_names = TokenNames(model.tokenizer)
        self.features = features or FeatureCache(0)
        self.prefix_cache = prefix_cache
        self.sparse_prefill = sparse_prefill
        self.fixed = fixed
        self.advanced = 0.0
        """When the decoding rows last got a token."""
        self.pending_chunk_seconds: list[float] = []
        """Expected seconds of the chunks that were launched after the last pass of the rows."""
        self.read_at = 0.0
        """When the device became idle, because drafts needed the last tokens."""
        self.corrupted: set[Row] = set()
        """Rows of this step whose caches are corrupted."""
        self.batch.shows = self.drafting.shows
        # without cycles, the weights of a model that leaves are free at once
        engine: Engine = weakref.proxy(self)
        self.commit = Commit(engine)
        self.decode = Decode(engine)
        self.prefill = Prefill(engine)
        scheduler.preview = lambda job: engine._preview(job)
        if prefix_cache is not None:
            scheduler.claim = prefix_cache.claim
        self._waits_for_disk = False

    @property
    def batch(self) -> DecodeBatch:
        """The rows that decode."""
        return self.batching.rows

    @property
    def mixes(self) -> bool:
        return self.batching.mixes

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and all events are delivered."""
        return self.scheduler.idle and self.output.empty

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def rest(self) -> float:
        if self.idle:
            return inf
        return RESTORING_REST if self._waits_for_disk else 0.0

    # -- requests

    def submit(self, request: Request) -> None:
        """The request has passed the scheduler's `check`."""
        if request.phase is Phase.DONE:
            return  # cancelled before it arrived
        self.end_ahead()
        job = self.scheduler.submit(request, self.clock())
        self.commit.look_up(job)
        if request.ahead:
            prefixes = self.prefix_cache
            if prefixes is None or not prefixes.pays_ahead(job):
                self.commit.abandon(request)
            return
        self.recorder.request_queued()

    def prefill_ahead(self, request: Request) -> None:
        """Prefill a prompt without a reply (`Request.ahead`) while no request is here and its
        memory is free."""
        prefixes = self.prefix_cache
        if prefixes is not None and self.scheduler.fits_ahead(request, prefixes.nbytes):
            self.submit(request)
        else:
            request.drop_rows()

    def end_ahead(self) -> None:
        for job in [job for job in self.scheduler.waiting if job.request.ahead]:
            self.commit.abandon(job.request)

    def cancel(self, request: Request) -> None:
        self.commit.cancel(request)

    def fail(self, request: Request, error: MLXProviderError) -> None:
        self.commit.fail(request, error)

    # -- the step

    def step(self) -> list[Post]:
        """Advance every row by one token and one prompt by one chunk. Returns the events for
        readers. The rows' next tokens are drawn before a chunk runs in its own pass, so no
        stream waits for it."""
        record = self.schedule()
        self._prepare(record)
        plan, drafts, caught_up = self.decode.draft(record.plan)
        self.scheduler.ran(plan)
        self.decode.commit(self.decode.run(plan, drafts, caught_up=caught_up))
        self.prefill.commit(self.prefill.run(plan))
        self._settle()
        self._remember(record.now, plan)
        restoring = any(job.restoring for job in self.scheduler.waiting)
        self._waits_for_disk = restoring and not record.runs
        return self.output.take()

    def schedule(self) -> StepRecord:
        """Decide the next step. Changes nothing."""
        now = self.clock()
        return self.scheduler.schedule(
            now,
            mixes=self.batching.mixes,
            stalled=now - self.advanced + sum(self.pending_chunk_seconds),
            passes=self.batch.passes,
        )

    def _preview(self, job: PrefillJob) -> Start | None:
        with Isolation():  # what fails here fails again, and is reported, when the prompt begins
            return self._start_of(job)
        return Start(0, job.cuts)

    def _start_of(self, job: PrefillJob) -> Start | None:
        if not job.uses_prefix_cache:
            return Start(0, job.cuts)
        found = Start()
        if self.prefix_cache is not None:
            start = self.prefix_cache.preview(job)
            if start is None:
                return None
            found = Start(*start)
        sparse = self.sparse_prefill
        if sparse is not None and sparse.will_score(job, found.done):
            return Start(scored=True)
        return found

    def _prepare(self, record: StepRecord) -> None:
        """What happens before the passes: requests and rows end or wait, prompts begin."""
        commit, prefixes = self.commit, self.prefix_cache
        for request in record.expired:
            commit.fail(request, RequestTimedOut("the request's time limit has passed"))
        for row in record.cut:
            commit.cut(row)
        for row, tokens in record.trims.items():
            if prefixes is not None:
                prefixes.trim(row, tokens)
        for row in record.preempted:
            commit.keep(row.request, [row])
            commit.drop([row])
        for job in self.scheduler.apply(record):
            commit.look_up(job)
        for job in record.begins:
            self.output.started(job.request)
            with commit.isolated(job.request, "its prefill"):
                commit.begin(job)

    def _settle(self) -> None:
        """Charge rows for the caches in which a step has left them."""
        if self.prefix_cache is not None:
            self.prefix_cache.settle(self.scheduler.running, self.batch.layout.cache_of)
        self.charge_merged()

    def charge_merged(self) -> None:
        """Charge rows in caches with others as much as the longest. Call it after rows have joined,
        left or decoded."""
        merged = self.batch.layout.merged()
        for row in self.scheduler.running:
            row.merged = merged.get(row, 0)

    def _remember(self, now: float, plan: StepPlan) -> None:
        ended = self.clock()
        if plan.rows or plan.chunk is not None:
            chunk = 0 if plan.chunk is None else plan.chunk.size
            seconds, decoded = ended - now, self.output.decoded
            self.recent.steps.add(Step(ended, seconds, len(plan.rows), decoded, chunk, plan.mixed))
            self.recorder.step(seconds, chunk, mixed=plan.mixed)
