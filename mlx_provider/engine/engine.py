"""One model's engine: its queue, and the step: schedule, run, commit."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

from ..errors import MLXProviderError, RequestTimedOut
from ..isolation import Fault, Isolation
from ..records import LoadedModel
from . import decode, prefill
from .decode import LaunchedPass
from .execution.decode_batch import DecodeBatch
from .inputs import FeatureCache
from .prefill import ChunkResult
from .prefix_cache.policy import PrefixCachePolicy
from .request import Phase, PrefillJob, Request, Row
from .scheduling.costs import PassTimer
from .scheduling.scheduler import Scheduler
from .scheduling.step import StepRecord
from .sparse_prefill import SparsePrefill
from .speculation.speculation import Speculation
from .step_output import Post, Recorder, StepOutput

BLOCKED_REST = 0.05
"""Longest seconds between steps while no pass can run: for the disk, or for memory."""


class Engine:
    """The queue, rows and caches of one model. Engine thread only."""

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        *,
        layout: str,
        mixes: bool = False,
        make_cache: Callable[[], list[Any]],
        recorder: Recorder,
        prefix_cache: PrefixCachePolicy | None = None,
        features: FeatureCache | None = None,
        speculation: Speculation | None = None,
        sparse_prefill: SparsePrefill | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layout`, `mixes`: of the probe; fixed passes of a reproducible model replace them."""
        self.model = model
        self.scheduler = scheduler
        self.make_cache = make_cache
        self.clock = clock
        self.output = StepOutput(recorder, clock, model.tokenizer)
        self.drafting = speculation or Speculation(vocab=0)
        fixed, hidden_model = scheduler.chunking.fixed, self.drafting.hidden_model
        self.batch = DecodeBatch(model, layout, mixes=mixes, fixed=fixed, hidden_model=hidden_model)
        self.timer = PassTimer(scheduler.costs)
        self.features = features or FeatureCache(0)
        self.prefix_cache = prefix_cache
        self.sparse_prefill = sparse_prefill
        self.deliver: Callable[[list[Post]], object] | None = None
        """Gets the events so far before a prompt runs in its own pass."""
        self._blocked = False

    def step(self) -> list[Post]:
        """Advance the rows by a token or more, and one prompt by a chunk. Returns the events for
        readers that `deliver` did not get."""
        now = self.clock()  # of all its records, so that no prompt overtakes one about to begin
        while True:
            record = self.schedule(now)
            for result in self.run(record):
                self.commit(result)
            # a prompt begins once: it then has a cache, or is restoring, or has ended
            if not record.to_begin:  # else the passes are in the next record
                return self.output.take()

    def schedule(self, now: float) -> StepRecord:
        """Decide the step. Changes nothing."""
        # a row that runs again has a pass of its own, so that a failure is its own
        retrying = any(row.retry_alone for row in self.scheduler.running)
        return self.scheduler.schedule(
            now,
            mixes=self.batch.mixes and not retrying,
            stalled=self.timer.stall_seconds(now) if self.scheduler.waiting else 0.0,
            passes=self.batch.layout.pass_count,
        )

    def run(self, record: StepRecord) -> Iterator[LaunchedPass | ChunkResult]:
        """Execute the decisions of the record, and launch its passes. Changes requests, events,
        the queue, costs and all caches. The caller commits each result before it asks for the next
        one: the rows' last tokens are delivered, and their next ones drawn, before a chunk runs in
        its own pass. If drafts pay, the last tokens are committed before any pass."""
        self._apply_decisions(record)
        plan = self.scheduler.remaining_plan(record.plan)
        plan, drafts, committed_at = decode.commit_and_draft(self, plan)
        self.scheduler.charge_step(plan)
        if (launched := decode.launch_pass(self, plan, drafts, committed_at)) is not None:
            yield launched
        # events do not wait for a prompt's own pass
        host_waits = plan.prepared is not None or (plan.chunk is not None and not plan.mixed)
        if host_waits and self.deliver is not None and not self.output.empty:
            self.deliver(self.output.take())
        if (prefilled := prefill.run(self, plan)) is not None:
            yield prefilled
        if self.prefix_cache is not None:  # rows that a pass has merged have left theirs
            self.prefix_cache.detach(self.scheduler.running, self.batch.layout.cache_of)
        self.update_merged_lengths()
        if plan.rows or plan.chunk is not None or self.output.decoded:
            self.output.add_step(plan, record.now)
        self._blocked = record.empty

    def commit(self, result: LaunchedPass | ChunkResult) -> None:
        """Take tokens and draw the next ones, or count a chunk and let a complete prompt decode.
        Changes requests, events, the queue, costs, statistics, the batch and the prefix cache."""
        if isinstance(result, LaunchedPass):
            decode.commit(self, result)
            if result.chunk is not None:
                prefill.commit_mixed(self, result.chunk, result.forward)
        else:
            prefill.commit(self, result)

    def _apply_decisions(self, record: StepRecord) -> None:
        """Before the passes: end requests and rows, preempt rows, admit and begin prompts."""
        prefixes = self.prefix_cache
        for request in record.to_expire:
            self.fail(request, RequestTimedOut("the request's time limit has passed"))
        for row in record.to_end:
            decode.finish_by_length(self, row)
        for row, tokens in record.to_trim.items():
            # of rows that have ended, the lease has, too; preempted ones will store their buffers
            if row.lease is not None and row not in record.to_preempt:
                row.lease.trim(tokens)
        if prefixes and record.admit_in_place and record.to_admit in self.scheduler.waiting:
            prefixes.lease(record.to_admit)  # else storing preempted rows might evict its prefix
        requeued = []
        for row in record.to_preempt:
            # as `free` does, but the row returns to the queue
            if row in self.scheduler.running:  # else its request failed when another row ended
                self.store(row.request, [row])
                self.drop_rows([row])
                requeued.append(self.scheduler.preempt_row(row))
                self.end_leases([row])
        self.scheduler.apply(record)  # it may evict prefixes, so look-ups come after it
        for job in (*requeued, *record.to_look_up):
            self.look_up(job)
        for job in record.to_begin:
            if job not in self.scheduler.waiting:
                continue
            self.output.start(job.request)
            with self.isolate(job.request, "its prefill"):
                prefill.begin(self, job)

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and all events are delivered."""
        return self.scheduler.idle and self.output.empty

    @property
    def rest(self) -> float:
        """Seconds until the next step is useful, unless a request arrives before."""
        return inf if self.idle else BLOCKED_REST * self._blocked

    # -- requests

    def submit(self, request: Request) -> None:
        """Queue a request that has passed the scheduler's `check`."""
        if request.phase is Phase.DONE:
            return  # cancelled before it arrived
        self.end_background()
        job = self.scheduler.submit(request, self.clock())
        self.look_up(job)
        if not request.background:
            self.output.recorder.count("requests_received")
        elif self.prefix_cache is None or not self.prefix_cache.pays_in_background(job):
            self.abandon(request)

    def prefill_in_background(self, request: Request) -> None:
        """Prefill a prompt without a reply (`Request.background`) if its memory is free."""
        prefixes = self.prefix_cache
        if prefixes is not None and self.scheduler.fits_background(request, prefixes.cache.nbytes):
            self.submit(request)
        else:
            request.unlink()

    def end_background(self) -> None:
        for job in [job for job in self.scheduler.waiting if job.request.background]:
            self.abandon(job.request)

    def look_up(self, job: PrefillJob) -> None:
        if self.prefix_cache is not None and job.uses_prefix_cache:
            self.prefix_cache.look_up(job)

    def cancel(self, request: Request) -> None:
        if self.abandon(request):
            self.output.end(request, "cancelled")

    def fail(self, request: Request, error: MLXProviderError) -> None:
        if self.abandon(request):
            self.output.fail(request, error)

    def isolate(self, request: Request, part: str) -> Isolation:
        """Wraps a request's own work. An error in it ends only this request."""
        return Isolation(partial(self.fail_by_fault, request, part))

    def fail_by_fault(self, request: Request, part: str, fault: Fault) -> None:
        fault.log(f"request {request.id}: {part}")
        self.fail(request, fault.of_request(part))

    def abandon(self, request: Request) -> bool:
        """End a request without an event, and store its prefixes. Returns whether it was active."""
        if request.phase is Phase.DONE:
            return False
        for row in request.unfinished_rows:
            row.finish = "cancelled"
        self.free(request, request.rows)
        if request.background:
            request.unlink()  # no client reads it
        return True

    def free(self, request: Request, rows: Sequence[Row]) -> None:
        """Store rows that have ended, drop them from batch and queue, and end their leases."""
        running = [row for row in rows if row in self.scheduler.running]
        self.store(request, rows)
        self.drop_rows(running)
        self.scheduler.remove_rows(running)
        ended = [] if request.unfinished_rows else self.scheduler.remove_request(request)
        self.end_leases(rows)
        if not request.unfinished_rows:
            request.features = {}
        for job in ended:
            job.restart()  # references to its last passes then keep no cache alive

    def drop_rows(self, rows: Sequence[Row]) -> None:
        self.batch.drop(rows)
        self.drafting.forget(rows)
        self.update_merged_lengths()

    def update_merged_lengths(self) -> None:
        """For rows in one padded cache. Call it after rows have joined, left or decoded."""
        merged = self.batch.layout.merged_lengths()
        for row in self.scheduler.running:
            row.merged_length = merged.get(row, 0)

    def store(self, request: Request, rows: Sequence[Row]) -> None:
        """Store what rows have computed, and prefills if the request has ended."""
        prefixes, running = self.prefix_cache, self.scheduler.running
        if prefixes is None:
            return
        left = [] if request.unfinished_rows else self.scheduler.waiting
        for job in [job for job in left if job.request is request]:
            prefixes.keep_prefill(job)
        for row in [row for row in rows if row in running and not row.corrupted]:
            if cached := self.batch.cached_reply_tokens(row):
                prefixes.keep_row(row, row.tokens[:cached], partial(self.batch.extract, row))

    def end_leases(self, rows: Sequence[Row]) -> None:
        """Release what rows lease, once the scheduler, whose rows the ledger counts, has them no
        more. A corrupted row's lease is dropped unreleased, so that its buffers are lost."""
        for row in rows:
            if self.prefix_cache is not None and not row.corrupted:
                self.prefix_cache.release(row)
            row.lease = None
