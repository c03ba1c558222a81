"""One model's engine. A step: let a prompt in, plan, run the plan, commit what was computed."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import MLXProviderError, RequestTimedOut
from ..isolation import Fault, Isolation
from ..protocol.events import Delta, Embedded, Event, Finish, FinishReason
from ..records import LoadedModel, MediaSpan, PrefillChunk
from ..upstream.sparse_cache import sparse
from .agreement import ALONE, Agreement
from .execution.batching import Batching
from .execution.decode_batch import (
    NO_DRAFTS,
    DecodeBatch,
    Drafts,
    Forward,
    Logprob,
    Read,
    read_drawn,
)
from .execution.mixed_batch import piggybacked
from .execution.sampler import Drawn, draw
from .feature_cache import FeatureCache
from .fixed_shapes import FixedShapes
from .inputs import Inputs
from .memory import arrays
from .prefix_cache.cache import Match
from .prefix_cache.policy import PrefixCachePolicy
from .prompt_logprobs import prompt_logprobs
from .recent import LookedUp, Recent, Step
from .request import Phase, PrefillJob, Request, Row
from .request_log import Recorder
from .row_cache import grow_by
from .scheduling.pass_timer import PassTimer
from .scheduling.plan import Chunk, StepPlan
from .scheduling.scheduler import Scheduler
from .sparse_prefill.passes import run_alone
from .sparse_prefill.sparse_prefill import SparsePrefill
from .speculation.ahead import Mask, ahead
from .speculation.speculation import Speculation
from .speculation.step import DraftStep, Place, places
from .step_output import Post, StepOutput
from .token_names import TokenNames
from .told import Names, request_told
from .unlike import Unlike

log = logging.getLogger(__name__)

T = TypeVar("T")

LONG_PREFILL = 2048
"""Tokens of a prefill after which MLX's free buffers go back: decoding needs none of their size."""


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
        self.make_cache = make_cache
        self.recorder = recorder
        self.output = StepOutput(recorder, clock)
        self.features = features or FeatureCache(0)
        self.prefix_cache = prefix_cache
        self.sparse_prefill = sparse_prefill
        self.agreed = agreed
        self.clock = clock
        self._named = Names(scheduler)
        self._fixed = fixed
        self._batching = Batching(model, layout, mixes=mixes, fixed=fixed, joining=unlike)
        self.batch = self._batching.rows
        self.recent = Recent()
        self._drafting = DraftStep(speculation, scheduler, recorder, self.recent, self._isolated)
        self.batch.shows_hidden = self._drafting.shows_hidden
        self._timer = PassTimer(scheduler.costs)
        self._names = TokenNames(model.tokenizer)
        self._next_deadline = inf
        """No request can expire before this time."""
        self._advanced = 0.0
        """When the rows that decode last got a token."""
        self._behind: list[float] = []
        """Expected seconds of chunks that were launched after the last pass of the rows."""
        self._read_at = 0.0
        """When the device had nothing to do, as tokens were read that drafts needed."""
        self._corrupted: set[Row] = set()
        """Rows of this step whose caches are not what they should be."""

    # -- requests

    def submit(self, request: Request) -> None:
        """Queue a request that passed the scheduler's `check`."""
        if request.phase is Phase.DONE:
            return  # cancelled before it arrived
        self.agreed.tell("submit", partial(request_told, request))
        self._look_up(self.scheduler.submit(request, self.clock()))
        self.recorder.request_queued()
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def cancel(self, request: Request) -> None:
        """End a request wherever it is; what it held is free at once."""
        if self._abandon(request):
            self.output.ended(request, "cancelled")

    def fail(self, request: Request, error: MLXProviderError) -> None:
        """End a request with an error its reader sees."""
        if self._abandon(request):
            self.output.failed(request, error)

    def _abandon(self, request: Request) -> bool:
        """Whether the request was still going on."""
        if request.phase is Phase.DONE:
            return False
        self.agreed.tell("ended", lambda: {"id": request.id})
        for row in request.unfinished:
            row.finish = "cancelled"
        self._release(request, request.rows)
        return True

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and every event has been handed out."""
        return self.scheduler.idle and self.output.empty

    @property
    def mixes(self) -> bool:
        """Whether chunks of prompts may share the pass of rows that decode."""
        return self._batching.mixes

    # -- the step

    def step(self) -> list[Post]:
        """Advance every row by one token and one prompt by one chunk; what readers get."""
        self.agreed.tell("step", dict)
        self._expire()
        self._admit()
        now, named = self.clock(), self._named
        own = partial(self._decided, now)
        plan, wanted = self.agreed.on("plan", own, named.step_told, named.step_heard)
        if plan.rows:
            self._decode(plan, wanted)
            self._make_room()
        if plan.chunk is not None and not plan.mixed:
            self._prefill(plan)
        if plan.scored is not None:
            self._score(plan.scored, plan.scoring_seconds)
        if plan.rows or plan.chunk is not None:
            self._ran(plan, now)
        return self.output.take()

    def _decided(self, now: float) -> tuple[StepPlan, dict[Row, int]]:
        """What a step does; for whom drafts are worth it in it, and how many."""
        plan = self.scheduler.plan(
            now,
            mixes=self.mixes,
            stalled=now - self._advanced + sum(self._behind),
            passes=self.batch.passes,
        )
        wanted = self._drafting.wanted(plan, possible=self._batching.drafts) if plan.rows else {}
        return plan, wanted

    def _ran(self, plan: StepPlan, began: float) -> None:
        """Remember a step, for who watches."""
        ended, chunk = self.clock(), plan.chunk.size if plan.chunk is not None else 0
        step = Step(ended, ended - began, len(plan.rows), self.output.decoded, chunk, plan.mixed)
        self.recent.steps.add(step)
        self.recorder.step(step.seconds, chunk, mixed=plan.mixed)

    def _expire(self) -> None:
        now = self.clock()
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
        """Let one more prompt in, and give a cache to whoever was let in and has none."""
        named = self._named
        self.agreed.on(
            "admitted",
            lambda: self.scheduler.admit(self.clock()),
            named.job_told,
            lambda told: self.scheduler.let_in(named.job_heard(told)),
        )
        for job in [j for j in self.scheduler.waiting if j.admitted and j.cache is None]:
            self.output.started(job.request)
            with self._isolated(job.request, "its prefill"):
                self._begin(job)

    def _look_up(self, job: PrefillJob) -> None:
        if self.prefix_cache is not None and job.shares:
            with Isolation(partial(_not_cached, job.request)):
                self.prefix_cache.look_up(job)

    def _begin(self, job: PrefillJob) -> None:
        room = len(job.tokens) if job.embeds else self.scheduler.room(job)
        if self.prefix_cache is not None and job.shares:
            with Isolation(partial(_not_cached, job.request)):
                self._looked_up(job.request, self.prefix_cache.begin(job, room))
        if self.sparse_prefill is not None and job.shares:
            self.sparse_prefill.begin(job)
        if not job.shares:
            job.leave_prefix()
        if job.cache is None:
            job.cache = self.make_cache()
            grow_by(job.cache, room)
        if job.places is not None:
            job.cache = sparse(job.cache)
        self.recorder.tokens(prefilled=0, cached=job.done, decoded=0)

    def _looked_up(self, request: Request, found: Match | None) -> None:
        if found is None:
            return
        diverged = found.diverged_at is not None
        told = LookedUp(self.clock(), request.id, found.asked, found.shared, found.length, diverged)
        self.recent.lookups.add(told)
        self.recorder.looked_up(told.lost)

    def _make_room(self) -> None:
        """Rows that have outgrown the memory: the youngest waits; what could not go on ends."""
        while (found := self._overflowing()) is not None:
            row, may_wait = found
            if not may_wait:
                self._finish(row, "length")
                continue
            self._keep(row.request, [row])
            self._drop([row])
            self._look_up(self.scheduler.preempt(row))

    def _overflowing(self) -> tuple[Row, bool] | None:
        """A row that has outgrown the memory, and whether it can go on later."""
        row = self.agreed.on(
            "overflowing",
            self.scheduler.overflowing,
            self._named.row_told,
            self._named.row_heard,
        )
        if row is None:
            return None
        return row, self.agreed.on("may wait", partial(self.scheduler.may_wait, row), bool, bool)

    # -- decode

    def _decode(self, plan: StepPlan, wanted: dict[Row, int]) -> None:
        """One token for every row, or several, and a chunk that is mixed into their pass.

        The pass is launched before the last one's tokens are read, unless those are needed for
        drafts: the device then waits meanwhile.
        """
        caught_up = bool(wanted) or self.batch.drafted
        if caught_up and not self._catch_up():
            return
        drafts = self._guessed(wanted) if wanted else NO_DRAFTS
        chunk = plan.chunk if plan.mixed else None
        if chunk is not None and chunk.job.cache is None:
            chunk = None  # its request has ended meanwhile
        expected, began = self._drafting.seconds(plan, drafts), self.clock()
        forward = self.batch.forward(self._batching.mixed.take_along(chunk), drafts)
        self._timer.launched(expected, self.clock() if caught_up else began)
        if drafts:
            self._drafting.waited(self.clock() - self._read_at)
        self._corrupted = {row for rows, _ in forward.failed for row in rows}
        for _, cause in forward.failed:
            self.agreed.failed(cause)  # before this rank waits for those that wait for it
        if not caught_up and not self._read():
            return
        for rows, cause in forward.failed:
            left = [row for row in rows if row.finish is None]
            self._pass_failed(left, cause, alone=len(rows) == 1, mixed=chunk is not None)
        if forward.logits is not None:
            self._draw_next(forward, forward.logits)
        if chunk is not None and forward.took_chunk and chunk.job.cache is not None:
            chunk.job.hidden = [] if forward.chunk_hidden is None else [forward.chunk_hidden]
            self._mixed_in(chunk, forward.chunk_logits)  # it has neither ended nor started again
        self._behind = []
        self._advanced = self.clock()
        if not forward.failed:
            self._batching.passed(len(forward.rows))

    def _guessed(self, wanted: dict[Row, int]) -> Drafts:
        """What rows may say next."""
        own = partial(self._drafting.guessed, wanted)
        return self.agreed.on("guessed", own, self._named.drafts_told, self._named.drafts_heard)

    def _read(self) -> bool:
        """Take the tokens of the last pass, while the next one runs."""
        with Isolation() as reading:
            read = self.batch.read()
        if reading.fault is not None:
            return self._unreadable(reading.fault)
        now = self.clock()
        self._timer.ended(now, left=1 + len(self._behind))
        self._commit(read, now)
        return True

    def _catch_up(self) -> bool:
        """Take the tokens of the last pass before the next one is launched."""
        with Isolation() as reading:
            found = self.batch.catch_up()
        if reading.fault is not None:
            return self._unreadable(reading.fault)
        now = self._read_at = self.clock()
        guessed = sum(drafts for _, drafts, _ in found)
        times = self._timer.ended(now, left=len(self._behind), usual=not guessed)
        self._drafting.passed(guessed, times)
        for row, drafts, reads in found:
            self._drafting.held(row, drafts, len(reads) - 1)
            for stay, read in enumerate(reads, 1):
                if row.finish is None:
                    self.batch.keep(row, stay)
                    self._commit([read], now)
        return True

    def _unreadable(self, fault: Fault) -> bool:
        self._corrupted = set(self.scheduler.running)
        self._retry(list(self.scheduler.running), fault)
        return False

    def _draw_next(self, forward: Forward, logits: mx.array) -> None:
        """Draw after every position of the rows: of those with drafts, as if these held."""
        self._drafting.show(forward)
        wanted: Sequence[Place] = list(places(forward.rows))
        running = [row in self.scheduler.running and not self._replays(row) for row, _ in wanted]
        wanted, logits = _only(running, wanted, logits)
        if any(row.retry_alone for row, _ in wanted):
            wanted, logits = self._join_anew(wanted, logits)
        masks, ready = self._masks(wanted, forward.drafts)
        masks = [mask for mask, ok in zip(masks, ready, strict=True) if ok]
        wanted, logits = _only(ready, wanted, logits)
        if wanted:
            with Isolation(partial(self._retry, list(dict.fromkeys(row for row, _ in wanted)))):
                self._draw(wanted, logits, masks, forward.drafts)

    def _draw(
        self,
        places: Sequence[Place],
        logits: mx.array,
        masks: Sequence[Mask | None],
        drafts: Drafts,
    ) -> None:
        rows = [row for row, _ in places]
        if self._fixed is None:
            drawn = [ahead(row, drafts.get(row, ())[:at]) for row, at in places]
            self.batch.drawn(rows, self._drawn(logits, drawn, masks), drafts)
            return
        for i, row in enumerate(rows):
            self.batch.drawn([row], self._drawn(logits[i : i + 1], [row], masks[i : i + 1]))

    def _drawn(self, logits: mx.array, rows: Sequence[Row], masks: Sequence[Mask | None]) -> Drawn:
        """The next token of each row, from logits (B, vocab)."""
        return self.agreed.drawn(logits, partial(draw, logits, rows, masks))

    def _replays(self, row: Row) -> bool:
        """Whether the next token of a row was committed before, and is run again."""
        return self._fixed is not None and self.batch.replays(row)

    def _masks(
        self, places: Sequence[Place], drafts: Drafts = NO_DRAFTS
    ) -> tuple[list[Mask | None], list[bool]]:
        """Grammar masks, and whose rows go on; a grammar that fails ends its request alone."""
        masks: list[Mask | None] = [None] * len(places)
        if any(row.constraint is not None for row, _ in places):
            own = partial(self._own_masks, places, drafts)
            masks = self.agreed.on("masks", own, lambda _: None, lambda _: masks)
        return masks, [row.finish is None for row, _ in places]

    def _own_masks(self, places: Sequence[Place], drafts: Drafts) -> list[Mask | None]:
        masks: list[Mask | None] = []
        for row, at in places:
            mask = None
            if row.finish is None and row.constraint is not None and row in drafts:
                mask = row.masks[at]
            elif row.finish is None and row.constraint is not None:
                with self._isolated(row.request, "its grammar"):
                    mask = row.constraint.mask()
            masks.append(mask)
        return masks

    def _commit(self, reads: Sequence[Read], now: float) -> None:
        """Take drawn tokens: text out, and the rows' ends where they are reached."""
        live = [read for read in reads if read[0].finish is None]
        for row, token, _ in live:
            self.output.token(row.request, now)
            row.tokens.append(token)
        reasons = self.agreed.on("read", partial(self._shown, live), _same, _same)
        for (row, _, _), reason in zip(live, reasons, strict=True):
            if reason is not None and row.finish is None:
                self._finish(row, reason)

    def _shown(self, reads: Sequence[Read]) -> list[FinishReason | None]:
        """Post what tokens add to the rows' texts; whose row ends with its token, and why."""
        reasons: list[FinishReason | None] = []
        for row, token, logprob in reads:
            reason = None
            if row.finish is None:  # another choice of its request may have failed
                with self._isolated(row.request, "its text"):
                    deltas, reason = self._take(row, token, logprob)
                    if deltas:
                        self.output.post(row.request, deltas)
            reasons.append(reason)
        return reasons

    def _take(
        self, row: Row, token: int, logprob: Logprob | None
    ) -> tuple[list[Any], FinishReason | None]:
        request = row.request
        if token in request.stop_tokens:
            return [], "stop"
        if row.constraint is not None:
            row.constraint.advance(token)
        described = None if logprob is None else self._names.described(token, logprob)
        deltas = list(row.output.push(token, described))
        if row.output.stopped or (row.constraint is not None and row.constraint.finished):
            return deltas, "stop"
        return deltas, "length" if len(row.tokens) >= request.max_tokens else None

    # -- prefill

    def _prefill(self, plan: StepPlan) -> None:
        """The chunk in a forward pass of its own."""
        chunk = plan.chunk
        if chunk is None:
            return
        job = chunk.job
        if job not in self.scheduler.waiting or job.cache is None:
            return  # in this step its request has ended, or starts again
        logits: mx.array | None = None
        with Isolation() as tried:
            if job.request.inputs is None:
                logits = self._run_chunk(chunk, plan)
            else:
                self._run_input(chunk, plan, job.request.inputs)
        if tried.fault is not None:
            self.agreed.failed(tried.fault)
            self._timer.forget()
            job.cache = None  # corrupted: not for the prefix cache
            self._failed_by(job.request, "its prefill", tried.fault)
            return
        if logits is not None:
            self._join(job, logits)

    def _run_chunk(self, chunk: Chunk, plan: StepPlan) -> mx.array | None:
        """Append the chunk to the row's cache; logits (vocab,) if it is the last one."""
        job, request = chunk.job, chunk.job.request
        prompt, cache = job.prompt, job.held()
        media = [s for s in prompt.spans if s.start < chunk.stop and s.end > chunk.start]
        for span in media:
            self._embed(request, span)
        self._timer.launched(plan.chunk_seconds, self.clock())
        given = PrefillChunk(prompt, chunk.start, chunk.stop, cache, request.features)
        if job.places is not None:
            logits = run_alone(self.model, piggybacked(chunk))
        elif job.tells_prompt:
            logits = self._told_prompt(request, given)
        else:
            logits = self._drafting.prefilled(self.model, job, given)
        last = chunk.stop == len(job.tokens)
        wanted = [logits, *job.hidden] if last else arrays(cache)
        # a family may run a whole image with its first tokens, others for free
        self._settle(chunk, plan, wanted, wait=last or bool(media), usual=not media)
        return logits if last else None

    def _told_prompt(self, request: Request, chunk: PrefillChunk) -> mx.array:
        """Append a chunk and tell how likely its tokens were; logits (vocab,) after its last."""
        told, after = prompt_logprobs(self.model, chunk, request, self._names)
        for row in request.rows:
            self.output.post(request, [Delta(index=row.index, logprobs=told)])
        return after

    def _run_input(self, chunk: Chunk, plan: StepPlan, inputs: Inputs) -> None:
        """Append the chunk to the input's cache; the last one makes its vector."""
        job = chunk.job
        self._timer.launched(plan.chunk_seconds, self.clock())
        inputs.run(self.model, PrefillChunk(job.prompt, chunk.start, chunk.stop, job.held()))
        pooled = [] if inputs.pooled is None else [inputs.pooled]
        last = chunk.stop == len(job.tokens)
        self._settle(chunk, plan, pooled if last else [*arrays(job.held()), *pooled], wait=last)
        if last:
            at = inputs.at
            self.output.post(job.request, [Embedded(index=at, vector=inputs.finish())])
            self._go_on(job, inputs)

    def _go_on(self, job: PrefillJob, inputs: Inputs) -> None:
        """With the next input, or the end of the request."""
        request = job.request
        if inputs.left:
            job.go_on_with(inputs.tokens[inputs.at])
            return
        for row in request.rows:
            row.finish = "stop"
        self._release(request, request.rows)
        self.output.ended(request, "stop")
        if request.prefilled >= LONG_PREFILL:
            mx.clear_cache()

    def _settle(
        self,
        chunk: Chunk,
        plan: StepPlan,
        wanted: list[mx.array],
        *,
        wait: bool,
        usual: bool = True,
    ) -> None:
        """Let the chunk's own pass run; `usual`: it tells at which pace the device runs."""
        if plan.rows and self.scheduler.running and not wait:
            # the next token's pass comes behind it without a gap
            mx.async_eval(wanted)  # type: ignore[no-untyped-call]
            self._batching.mixed.ran_apart(chunk.job)
            self._behind.append(plan.chunk_seconds)
        else:
            mx.eval(wanted)
            if not usual:
                self._timer.forget()
            self._timer.ended(self.clock())
            self._behind = []
        self._passed(chunk)

    def _score(self, job: PrefillJob, seconds: float) -> None:
        """A part of finding out which tokens of a prompt to leave out."""
        if self.sparse_prefill is None or job not in self.scheduler.waiting or job.scoring is None:
            return
        self.sparse_prefill.advance(job, seconds)
        self._timer.forget()  # whose passes these were nobody can tell
        self._behind = []
        if job.scoring is None:
            grow_by(job.held(), self.scheduler.room(job))
            self.recorder.skipped(job.request.skipped)

    def _mixed_in(self, chunk: Chunk, logits: mx.array | None) -> None:
        """A chunk is on its way beside the rows; `logits` (vocab,) follow it if it is the last."""
        job = chunk.job
        with Isolation() as tried:
            self._passed(chunk)
            if logits is not None:
                mx.eval(logits)
        if tried.fault is not None:
            told = tried.fault.told
            log.warning("request %s starts its prefill again: %s", job.request.id, told)
            self._batching.mixed.blame()
        elif logits is not None and job in self.scheduler.waiting:
            self._join(job, logits)

    def _passed(self, chunk: Chunk) -> None:
        """The chunk is in its job's cache."""
        job = chunk.job
        job.done = chunk.stop
        job.request.prefilled += chunk.size
        self.recorder.tokens(prefilled=chunk.size, cached=0, decoded=0)
        if self.prefix_cache is not None and job.shares:
            self.prefix_cache.passed(job, chunk.start)

    def _embed(self, request: Request, span: MediaSpan) -> None:
        if span.content_hash in request.features:
            return
        features = self.features.get(span.content_hash)
        if features is None:
            features = self.agreed.features(self.model, partial(self.model.embed, span))
            self.features.put(span.content_hash, features)
        request.features[span.content_hash] = features

    # -- from prefill to decode

    def _join(self, job: PrefillJob, logits: mx.array) -> None:
        """The whole prompt is in the cache: draw the first tokens and let the rows decode."""
        if not self.scheduler.running:
            self._advanced = self.clock()
        job.request.features = {}
        for span in job.request.prompt.spans:
            if span.ready is not None:
                span.ready.drop()
        if self.prefix_cache is not None:
            with Isolation(partial(_not_kept, job.request)):
                self.prefix_cache.keep_prefill(job)
        if job.request.prefilled >= LONG_PREFILL:
            mx.clear_cache()
        cache, job.cache = job.held(), None
        grow_by(cache, self.scheduler.growth(job))
        self.scheduler.join(job)
        caches = [cache, *(copy.deepcopy(cache) for _ in job.rows[1:])]
        for row, own in zip(job.rows, caches, strict=True):
            if row.held > len(job.tokens):
                self.scheduler.decode(row)
                self.batch.join_again(row, own)
            else:
                self._join_row(row, own, logits)
                self._drafting.begin(row, job)

    def _join_anew(
        self, wanted: Sequence[Place], logits: mx.array
    ) -> tuple[Sequence[Place], mx.array]:
        """Rows of a failed step that hold their committed tokens again join once more; the rest."""
        suspect = [row.retry_alone for row, _ in wanted]
        for (row, _), own in zip(*_only(suspect, wanted, logits), strict=True):
            cache = self.batch.layout.extract(row)
            self.batch.drop([row])
            self.scheduler.leave([row])
            self._join_row(row, cache, own)
        return _only([not each for each in suspect], wanted, logits)

    def _join_row(self, row: Row, cache: list[Any], logits: mx.array) -> None:
        drawn = self._draw_one(row, logits)
        if drawn is not None and row.retry_alone:
            drawn = self._prove(row, cache, drawn)
        if drawn is not None and self._first_token(row, drawn):
            self.scheduler.decode(row)
            self.batch.join(row, cache, drawn, committed=True)

    def _first_token(self, row: Row, drawn: Drawn) -> bool:
        """Take a token before the row joins, a step earlier; whether the row goes on."""
        with self._isolated(row.request, "its sampling") as work:
            read = read_drawn(drawn, {row: 0})
        if work.fault is not None:
            return False
        self._commit(read, self.clock())
        return row.finish is None

    def _draw_one(self, row: Row, logits: mx.array) -> Drawn | None:
        """The next token of one row; `None`: its request has failed."""
        masks, ready = self._masks([(row, 0)])
        if not ready[0]:
            return None
        with self._isolated(row.request, "its sampling") as work:
            drawn = self._drawn(logits[None], [row], masks)
            mx.async_eval(drawn.arrays)  # type: ignore[no-untyped-call]
        was_drawn = self.agreed.on("drawn", lambda: work.fault is None, bool, bool)
        return drawn if was_drawn else None

    # -- failures of the device

    def _prove(self, row: Row, cache: list[Any], drawn: Drawn) -> Drawn | None:
        """Decode a row of a failed step alone once; if that fails too, the row is what fails."""
        alone = DecodeBatch(self.model, self._batching.layout("solo"))
        alone.join(row, cache, drawn)
        with self._isolated(row.request, "its decode step") as work:
            forward = alone.forward()
            if forward.logits is None:
                raise forward.failed[0][1].error
            mx.eval(forward.logits)
            read = alone.read()
            alone.drop([row])  # its recurrent state is back in `cache`
        if work.fault is not None or forward.logits is None:
            return None
        row.retry_alone = False
        self._commit(read, self.clock())
        return None if row.finish is not None else self._draw_one(row, forward.logits[0])

    def _pass_failed(self, left: list[Row], fault: Fault, *, alone: bool, mixed: bool) -> None:
        """`left`: rows of the pass that have not ended meanwhile; `alone`: it had but one."""
        if mixed or (left and not alone):
            self._retry(left, fault)
        elif left:
            self._failed_by(left[0].request, "its decode step", fault)

    def _isolated(self, request: Request, part: str) -> Isolation:
        """Around a request's own work: whatever that raises ends this request alone."""
        return Isolation(partial(self._failed_by, request, part))

    def _failed_by(self, request: Request, part: str, fault: Fault) -> None:
        if not fault.ours:
            log.error("request %s: %s failed\n%s", request.id, part, fault.trace)
        self.fail(request, fault.of_request(part))

    def _retry(self, rows: Sequence[Row], fault: Fault) -> None:
        """Rows whose caches are corrupted start again from their committed tokens, each alone."""
        self.agreed.failed(fault)
        told = fault.told
        log.warning("a decode step of %d rows failed (%s); they are run again", len(rows), told)
        self._timer.forget()
        self._drop(rows)
        for job in self.scheduler.retry(rows):
            self._look_up(job)
        self._batching.failed()

    # -- endings

    def _finish(self, row: Row, reason: FinishReason) -> None:
        """End one choice; the request ends with its last one."""
        request = row.request
        found = self.agreed.on("finished", partial(self._last_text, row, reason), _same, _same)
        if found is None:
            return
        row.finish = found
        self._release(request, [row])
        if not request.unfinished:
            self.output.ended(request, found)

    def _last_text(self, row: Row, reason: FinishReason) -> FinishReason | None:
        """Post the last of a row's text; why it ends then, `None`: its request has failed."""
        with self._isolated(row.request, "its text"):
            deltas, reason = row.output.finish(reason)
            events: list[Event] = [*deltas, Finish(index=row.index, reason=reason)]
            self.output.post(row.request, events)
            return reason
        return None

    def _release(self, request: Request, rows: Sequence[Row]) -> None:
        """Free what rows hold: their place in the batch, or their prefill."""
        running = [row for row in rows if row in self.scheduler.running]
        self._keep(request, running)
        self._drop(running)
        self.scheduler.leave(running)
        if not request.unfinished:
            for job in self.scheduler.drop(request):
                job.restart()  # whoever remembers its last passes keeps no cache alive
            request.features = {}

    def _drop(self, rows: Sequence[Row]) -> None:
        """Let rows out of the batch, for good or until they have started again."""
        self.batch.drop(rows)
        self._drafting.forget(rows)

    def _keep(self, request: Request, running: Sequence[Row]) -> None:
        """Leave what rows and prefills of a request have computed to the prefix cache."""
        if self.prefix_cache is None:
            return
        with Isolation(partial(_not_kept, request)):
            for row in running:
                cached = self.batch.cached_tokens(row)
                if cached and row not in self._corrupted:
                    own = self.batch.extract(row)
                    self.prefix_cache.keep_row(row, row.tokens[:cached], own)
            for job in self.scheduler.waiting:
                if job.request is request and not request.unfinished:
                    self.prefix_cache.keep_prefill(job)


def _same(value: T) -> T:
    return value


def _only(
    wanted: Sequence[bool], places: Sequence[Place], logits: mx.array
) -> tuple[Sequence[Place], mx.array]:
    """Some of the positions, and their logits (B, vocab)."""
    if all(wanted):
        return places, logits
    at = [i for i, ok in enumerate(wanted) if ok]
    return [places[i] for i in at], logits[mx.array(at)] if at else logits[:0]


def _not_cached(request: Request, fault: Fault) -> None:
    log.error("request %s gets nothing from the prefix cache\n%s", request.id, fault.trace)


def _not_kept(request: Request, fault: Fault) -> None:
    log.error("request %s could not be kept in the prefix cache\n%s", request.id, fault.trace)
