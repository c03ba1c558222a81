"""One model's engine. A step: decode every row (or let a brief prompt pass), prefill a portion.

The portion has a pass of its own, or rides in the pass of the rows that decode.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import MLXProviderError, RequestTimedOut
from ..isolation import Fault, Isolation
from ..protocol.messages import Event, Finish, FinishReason
from ..records import LoadedModel, MediaSpan, PrefillChunk, Prompt
from .execution.batch_layout import make_layout
from .execution.decode_batch import DecodeBatch, Logprob, read_drawn
from .execution.mixed_batch import Rides
from .execution.sampler import Drawn, draw
from .feature_cache import FeatureCache
from .memory import arrays
from .prefix_cache.policy import Reuse
from .request import Phase, Prefill, Request, Row
from .request_log import Recorder
from .scheduling.scheduler import Chunk, Scheduler
from .step_output import Ledger, Post
from .token_names import TokenNames

log = logging.getLogger(__name__)

SHORT_TAIL = 128
"""Tokens at a prompt's end that run in one pass with the last one: their logits cost less than
reading the weights once more."""
FORGIVEN_AFTER = 256
"""Steps without a failure after which an earlier device failure no longer counts."""


class Engine:
    """Runs requests of one model. Every method belongs to the engine thread."""

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        *,
        layout: str,
        rides: bool = False,
        make_cache: Callable[[], list[Any]],
        recorder: Recorder,
        reuse: Reuse | None = None,
        features: FeatureCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layout`, `rides`: what the probe found."""
        self.model = model
        self.scheduler = scheduler
        self._rides = Rides(rides)
        scheduler.may_ride = self._rides.allows
        self.make_cache = make_cache
        self.recorder = recorder
        self.ledger = Ledger(recorder, clock)
        self.features = features or FeatureCache(0)
        self.reuse = reuse
        if reuse is not None:
            scheduler.provides = reuse.provides
        self.clock = clock
        self.batch = DecodeBatch(model, make_layout(layout))
        self._names = TokenNames(model.tokenizer)
        self._next_deadline = inf
        """No request can expire before this time."""
        self._undisturbed: tuple[float, int] | None = None
        """When the last decode step began, if no other pass came after its own, and the tokens
        that rode in that."""
        self._advanced = 0.0
        """When the rows that decode last got a token."""
        self._failures = 0
        self._quiet_steps = 0
        self._spoilt: set[int] = set()
        """Rows of this step whose caches are not what they should be."""

    # -- requests

    def submit(self, request: Request) -> None:
        """Queue a request that passed the scheduler's `check`."""
        if request.phase is Phase.DONE:
            return  # cancelled before it arrived
        work = self.scheduler.submit(request, self.clock())
        if self.reuse is not None:
            self.reuse.estimate(work)
        self.recorder.request_queued()
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def cancel(self, request: Request) -> None:
        """End a request wherever it is; what it held is free at once."""
        if request.phase is Phase.DONE:
            return
        for row in request.unfinished:
            row.finish = "cancelled"
        self._release(request, request.rows)
        self.ledger.ended(request, "cancelled")

    def fail(self, request: Request, error: MLXProviderError) -> None:
        """End a request with an error its reader sees."""
        if request.phase is Phase.DONE:
            return
        for row in request.unfinished:
            row.finish = "cancelled"
        self._release(request, request.rows)
        self.ledger.failed(request, error)

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and every event has been handed out."""
        return self.scheduler.idle and self.ledger.empty

    # -- the step

    def step(self) -> list[Post]:
        """Advance every row by one token and one prompt by one chunk; what readers get.

        Where a brief prompt may precede them, the rows wait for the next step.
        """
        self._expire()
        began = self.clock()
        self._measure_step(began)
        chunk = self.scheduler.next_chunk(began)
        rode = 0
        if self.scheduler.running and not self._precedes(chunk, began):
            rider = chunk if chunk is not None and chunk.rides else None
            self._decode(rider)
            self._make_room()
            self._advanced = self.clock()
            rode = 0 if rider is None else rider.stop - rider.start
            chunk = None if rode else self.scheduler.next_chunk(self._advanced)
        apart = chunk is not None and not chunk.rides  # what may ride waits for the next step
        if chunk is not None and apart:
            self._prefill(chunk)
        self._undisturbed = (began, rode) if self.scheduler.running and not apart else None
        return self.ledger.take()

    def _precedes(self, chunk: Chunk | None, now: float) -> bool:
        return chunk is not None and self.scheduler.precedes(chunk, now - self._advanced)

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

    def _measure_step(self, now: float) -> None:
        """A decode step lasts from one launch to the next, if no other pass came between."""
        if self._undisturbed is not None:
            before, rode = self._undisturbed
            self.scheduler.step_time.measured(now - before, rode)

    def _make_room(self) -> None:
        """Rows that have outgrown the memory: the youngest waits; what could not go on ends."""
        row = self.scheduler.overflowing()
        while row is not None:
            if not self.scheduler.may_wait(row):
                self._finish(row, "length")
                row = self.scheduler.overflowing()
                continue
            self._keep(row.request, [row])
            self.batch.drop([row])
            self.scheduler.preempt(row)
            row = self.scheduler.overflowing()

    # -- decode

    def _decode(self, riding: Chunk | None) -> None:
        """One token for every row, and a chunk that rides."""
        forward = self.batch.forward(self._rides.board(riding))
        self._spoilt = {id(row) for rows, _ in forward.failed for row in rows}
        with Isolation() as reading:
            read = self.batch.read()
        if reading.fault is not None:
            self._spoilt = set(map(id, self.scheduler.running))
            self._replay(list(self.scheduler.running), reading.fault)
            return
        now = self.clock()
        for row, token, logprob in read:
            self._commit(row, token, logprob, now)
        for rows, cause in forward.failed:
            left = [row for row in rows if row.finish is None]
            self._pass_failed(left, riding is not None, cause)
        if forward.logits is not None:
            self._draw_next(forward.rows, forward.logits)
        if riding is not None and forward.rider_logits is not None:
            self._rode(riding, forward.rider_logits)
        self._quiet_steps += 1
        if self._quiet_steps > FORGIVEN_AFTER:
            self._failures = 0
            self._rides.forgive()

    def _draw_next(self, rows: list[Row], logits: mx.array) -> None:
        at = self.batch.held(rows)
        if len(at) < len(rows):
            rows = [rows[i] for i in at]
            logits = logits[mx.array(at)] if at else logits[:0]
        masks, ready = self._masks(rows)
        if not all(ready):
            at = [i for i, ok in enumerate(ready) if ok]
            rows, masks = [rows[i] for i in at], [masks[i] for i in at]
            logits = logits[mx.array(at)] if at else logits[:0]
        if not rows:
            return
        with Isolation(partial(self._replay, rows)):
            self.batch.drawn(rows, draw(logits, rows, masks))

    def _masks(self, rows: Sequence[Row]) -> tuple[list[NDArray[np.uint32] | None], list[bool]]:
        """Grammar masks; a grammar that fails ends its request alone."""
        masks: list[NDArray[np.uint32] | None] = []
        ready = []
        for row in rows:
            mask, ok = None, row.finish is None
            if ok and row.constraint is not None:
                with self._work_of(row.request, "its grammar") as work:
                    mask = row.constraint.mask()
                ok = work.fault is None
            masks.append(mask)
            ready.append(ok)
        return masks, [ok and row.finish is None for ok, row in zip(ready, rows, strict=True)]

    def _commit(self, row: Row, token: int, logprob: Logprob | None, now: float) -> None:
        """Take a drawn token: text out, and the row's end where it is reached."""
        if row.finish is not None:
            return
        self.ledger.token(row.request, now)
        row.tokens.append(token)
        with self._work_of(row.request, "its text") as work:
            deltas, reason = self._take(row, token, logprob)
        if work.fault is not None:
            return
        if deltas:
            self.ledger.post(row.request, deltas)
        if reason is not None:
            self._finish(row, reason)

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

    def _prefill(self, chunk: Chunk) -> None:
        work, request = chunk.work, chunk.work.request
        self.ledger.started(request)
        with Isolation() as tried:
            chunk = self._begun(chunk)
            logits = self._run_chunk(chunk)
        if tried.fault is not None:
            work.cache = None  # spoilt: not for the prefix store
            self._failed_by(request, "its prefill", tried.fault)
            return
        self.recorder.tokens(prefilled=chunk.stop - chunk.start, cached=0, decoded=0)
        if logits is not None:
            self._join(work, logits)

    def _begun(self, chunk: Chunk) -> Chunk:
        """The chunk, after the work has its cache: what the prefix store had is skipped."""
        work = chunk.work
        if work.cache is not None:
            return chunk
        if self.reuse is None:
            work.cache = self.make_cache()
        else:
            self.reuse.begin(work)
            self.recorder.tokens(prefilled=0, cached=work.done, decoded=0)
        return self.scheduler.first(work)

    def _run_chunk(self, chunk: Chunk) -> mx.array | None:
        """Append the chunk to the row's cache; logits (vocab,) if it is the last one.

        After many tokens the last one runs alone: the output matrix is then applied to it and no
        other.
        """
        work, request = chunk.work, chunk.work.request
        prompt = work.prompt
        for span in prompt.spans:
            if span.start < chunk.stop and span.end > chunk.start:
                self._embed(request, span)
        last = chunk.stop == len(work.tokens)
        alone = last and chunk.stop - chunk.start > SHORT_TAIL
        stop = chunk.stop - 1 if alone else chunk.start if last else chunk.stop
        if stop > chunk.start:
            began = self.clock()
            self._run_pass(work, prompt, stop)
            self.scheduler.measured(stop - chunk.start, self.clock() - began)
        return self._run_pass(work, prompt, chunk.stop) if last else None

    def _run_pass(self, work: Prefill, prompt: Prompt, stop: int) -> mx.array | None:
        """Append the tokens up to `stop`; logits (vocab,) after the last one of the prompt."""
        start, cache = work.done, work.held()
        logits = self.model.prefill(PrefillChunk(prompt, start, stop, cache, work.request.features))
        wanted = stop == len(work.tokens)
        mx.eval(logits if wanted else arrays(cache))
        self._passed(work, stop)
        return logits if wanted else None

    def _passed(self, work: Prefill, stop: int) -> None:
        """The tokens up to `stop` are in the work's cache."""
        start, work.done = work.done, stop
        work.request.prefilled += stop - start
        if self.reuse is not None:
            self.reuse.passed(work, start)

    def _rode(self, chunk: Chunk, logits: mx.array) -> None:
        """A chunk is on its way through the model beside the rows; `logits` (vocab,) follow it."""
        work = chunk.work
        last = chunk.stop == len(work.tokens)
        with Isolation() as tried:
            self._passed(work, chunk.stop)
            if last:
                mx.eval(logits)
        if tried.fault is not None:
            told = tried.fault.told
            log.warning("request %s starts its prefill again: %s", work.request.id, told)
            self._rides.put_off()
            return
        self.recorder.tokens(prefilled=chunk.stop - chunk.start, cached=0, decoded=0)
        if last:
            self._join(work, logits)

    def _embed(self, request: Request, span: MediaSpan) -> None:
        if span.content_hash in request.features:
            return
        features = self.features.get(span.content_hash)
        if features is None:
            features = self.model.embed(span)
            self.features.put(span.content_hash, features)
        request.features[span.content_hash] = features

    def _join(self, work: Prefill, logits: mx.array) -> None:
        """The whole prompt is in the cache: draw the first tokens and let the rows decode."""
        if not self.scheduler.running:
            self._advanced = self.clock()
        self.scheduler.join(work)
        work.request.features = {}
        for span in work.request.prompt.spans:
            if span.ready is not None:
                span.ready.drop()
        if self.reuse is not None:
            with Isolation(partial(_not_kept, work.request)):
                self.reuse.keep_prefill(work)
        cache, work.cache = work.held(), None
        caches = [cache, *(copy.deepcopy(cache) for _ in work.rows[1:])]
        for row, own in zip(work.rows, caches, strict=True):
            self._join_row(row, own, logits)

    def _join_row(self, row: Row, cache: list[Any], logits: mx.array) -> None:
        drawn = self._draw_one(row, logits)
        if drawn is not None and row.suspect:
            drawn = self._prove(row, cache, drawn)
        if drawn is not None and self._first_token(row, drawn):
            self.batch.join([row], [cache], drawn, taken=True)

    def _first_token(self, row: Row, drawn: Drawn) -> bool:
        """Take a token before the row joins, a step earlier; whether the row goes on."""
        with self._work_of(row.request, "its sampling") as work:
            ((_, token, logprob),) = read_drawn([row], drawn)
        if work.fault is not None:
            return False
        self._commit(row, token, logprob, self.clock())
        return row.finish is None

    def _draw_one(self, row: Row, logits: mx.array) -> Drawn | None:
        """The next token of one row; `None`: its request has failed."""
        masks, ready = self._masks([row])
        if not ready[0]:
            return None
        with self._work_of(row.request, "its sampling") as work:
            drawn = draw(logits[None], [row], masks)
            mx.async_eval(drawn.arrays)  # type: ignore[no-untyped-call]
        return drawn if work.fault is None else None

    # -- failures of the device

    def _prove(self, row: Row, cache: list[Any], drawn: Drawn) -> Drawn | None:
        """Decode a suspect row alone once; if that fails too, the row is what fails."""
        alone = DecodeBatch(self.model, make_layout("solo"))
        alone.join([row], [cache], drawn)
        with self._work_of(row.request, "its decode step") as work:
            forward = alone.forward()
            if forward.logits is None:
                raise forward.failed[0][1].error
            mx.eval(forward.logits)
            ((_, token, logprob),) = alone.read()
        if work.fault is not None or forward.logits is None:
            return None
        row.suspect = False
        self._commit(row, token, logprob, self.clock())
        return None if row.finish is not None else self._draw_one(row, forward.logits[0])

    def _pass_failed(self, rows: list[Row], riding: bool, fault: Fault) -> None:
        if riding or len(rows) > 1:
            self._replay(rows, fault)
        elif rows:
            self._failed_by(rows[0].request, "its decode step", fault)

    def _work_of(self, request: Request, part: str) -> Isolation:
        """Around a request's own work: whatever that raises ends this request alone."""
        return Isolation(partial(self._failed_by, request, part))

    def _failed_by(self, request: Request, part: str, fault: Fault) -> None:
        if not fault.ours:
            log.error("request %s: %s failed\n%s", request.id, part, fault.trace)
        self.fail(request, fault.of_request(part))

    def _replay(self, rows: list[Row], fault: Fault) -> None:
        """Rows whose caches are spoilt start again from their committed tokens, each alone."""
        told = fault.told
        log.warning("a decode step of %d rows failed (%s); they are run again", len(rows), told)
        self.batch.drop(rows)
        self.scheduler.replay(rows)
        self._quiet_steps = 0
        if self._rides.put_off():
            return
        self._failures += 1
        if self._failures > 1 and self.batch.layout.name != "solo":
            self._go_solo()

    def _go_solo(self) -> None:
        """Batching itself fails: rows decode one by one from now on."""
        log.error("decoding together failed %d times: rows decode alone now", self._failures)
        solo = make_layout("solo")
        for each in self.batch.layout.passes():
            for row in each.rows:
                solo.add(row, self.batch.layout.extract(row))
        self.batch.layout = solo
        self._rides.possible = False

    # -- endings

    def _finish(self, row: Row, reason: FinishReason) -> None:
        """End one choice; the request ends with its last one."""
        request = row.request
        with self._work_of(request, "its text") as work:
            deltas, reason = row.output.finish(reason)
            events: list[Event] = [*deltas, Finish(index=row.index, reason=reason)]
        if work.fault is not None:
            return
        row.finish = reason
        self.ledger.post(request, events)
        self._release(request, [row])
        if not request.unfinished:
            self.ledger.ended(request, reason)

    def _release(self, request: Request, rows: Sequence[Row]) -> None:
        """Free what rows hold: their place in the batch, or their prefill."""
        running = set(map(id, self.scheduler.running))
        inside = [row for row in rows if id(row) in running]
        self._keep(request, inside)
        self.batch.drop([row for row in inside if self.batch.holds(row)])
        for row in inside:
            self.scheduler.leave(row)
        if not request.unfinished:
            self.scheduler.drop(request)
            request.features = {}

    def _keep(self, request: Request, rows: Sequence[Row]) -> None:
        """Leave what rows and prefills of a request have computed to the prefix store."""
        if self.reuse is None:
            return
        with Isolation(partial(_not_kept, request)):
            for row in rows:
                if id(row) in self._spoilt or not self.batch.holds(row):
                    continue
                if fed := self.batch.fed(row):
                    self.reuse.keep_row(row, row.tokens[:fed], self.batch.layout.extract(row))
            for work in self.scheduler.waiting:
                if work.request is request and not request.unfinished:
                    self.reuse.keep_prefill(work)


def _not_kept(request: Request, fault: Fault) -> None:
    log.error("request %s could not be kept in the prefix store\n%s", request.id, fault.trace)
