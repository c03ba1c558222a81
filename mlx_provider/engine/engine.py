"""One model's engine: its queue, and the step: schedule, run, commit."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from ..errors import MLXProviderError, RequestTimedOut
from ..isolation import Isolation
from ..records import LoadedModel
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
from .step.decode import Decode, Decoded
from .step.prefill import Prefill, Prefilled
from .step.requests import Requests
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
        self.batch = DecodeBatch(model, layout, mixes=mixes, fixed=fixed)
        self.drafting = speculation or Speculation(vocab=0)
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
        self.requests = Requests(engine)
        self.decode = Decode(engine)
        self.prefill = Prefill(engine)
        scheduler.preview = lambda job: engine._preview(job)
        scheduler.claim = lambda job: engine.requests.claim(job)
        self._waits_for_disk = False

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and all events are delivered."""
        return self.scheduler.idle and self.output.empty

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
        self.requests.look_up(job)
        if request.ahead:
            prefixes = self.prefix_cache
            if prefixes is None or not prefixes.pays_ahead(job):
                self.requests.abandon(request)
            return
        self.recorder.count("requests_received")

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
            self.requests.abandon(job.request)

    def cancel(self, request: Request) -> None:
        self.requests.cancel(request)

    def fail(self, request: Request, error: MLXProviderError) -> None:
        self.requests.fail(request, error)

    # -- the step

    def step(self) -> list[Post]:
        """Advance every row by one token and one prompt by one chunk. Returns the events for
        readers."""
        record = self.schedule()
        for result in self.run(record):
            self.commit(result)
        return self.output.take()

    def schedule(self) -> StepRecord:
        """Decide the step. Changes no request, row or cache; it may look a prompt up again."""
        now = self.clock()
        return self.scheduler.schedule(
            now,
            mixes=self.batch.mixes,
            stalled=now - self.advanced + sum(self.pending_chunk_seconds),
            passes=self.batch.passes,
        )

    def run(self, record: StepRecord) -> Iterator[Decoded | Prefilled]:
        """Execute the decisions of the record, and launch its passes. Changes the queue, the
        prefix cache and the caches of rows. The caller commits each result before it asks for the
        next one: the rows' next tokens are drawn before a chunk runs in its own pass, so no stream
        waits for it. If drafts pay, the last tokens are committed before any pass."""
        self._prepare(record)
        plan, drafts, caught_up = self.decode.draft(self.scheduler.remaining_plan(record.plan))
        self.scheduler.charge_step(plan)
        if (decoded := self.decode.run(plan, drafts, caught_up=caught_up)) is not None:
            yield decoded
        if (prefilled := self.prefill.run(plan)) is not None:
            yield prefilled
        if self.prefix_cache is not None:
            self.prefix_cache.settle(self.scheduler.running, self.batch.layout.cache_of)
        self.charge_merged()
        self._remember(record.now, plan)
        restoring = any(job.restoring for job in self.scheduler.waiting)
        self._waits_for_disk = restoring and not record.runs

    def commit(self, result: Decoded | Prefilled) -> None:
        """Take the tokens that were read and draw the next ones, or let the rows of a complete
        prompt decode. Changes requests, their events, and the rows of the batch."""
        if isinstance(result, Decoded):
            self.decode.commit(result)
        else:
            self.prefill.commit(result)

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
        requests, prefixes = self.requests, self.prefix_cache
        for request in record.expired:
            requests.fail(request, RequestTimedOut("the request's time limit has passed"))
        for row in record.cut:
            requests.cut(row)
        for row, tokens in record.trims.items():
            if prefixes is not None and row not in record.preempted:
                prefixes.trim(row, tokens)
        for row in record.preempted:
            if row in self.scheduler.running:  # else its request failed when another row was cut
                requests.store(row.request, [row])
                requests.drop_rows([row])
        for job in self.scheduler.apply(record):
            requests.look_up(job)
        for job in record.begins:
            if job not in self.scheduler.waiting:
                continue
            self.output.start(job.request)
            with requests.isolated(job.request, "its prefill"):
                requests.begin(job)

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
            self.recent.steps.append(
                Step(ended, seconds, len(plan.rows), decoded, chunk, plan.mixed)
            )
            runs = "mixed" if plan.mixed else "chunk" if chunk else "decode"
            self.recorder.observe("step_seconds", seconds, runs)
            if chunk:
                self.recorder.observe("chunk_tokens", chunk)
