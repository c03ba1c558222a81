"""The pass of the rows that decode, and of a mixed chunk; draws of their next tokens; and recovery
from a device failure: rows start again, each alone until it has decoded once.

A pass is launched before the tokens of the last one are read, so that the device does not wait for
the host. Only drafts need those tokens first. Each step calls `commit_and_draft`, `run` and
`commit`, in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from ..errors import MLXProviderError
from ..isolation import Fault, Isolation, attempt
from ..protocol.events import Delta, Event, Finish, FinishReason
from .execution.decode_batch import NO_DRAFTS, Drafts, Forward, Logprob, PassResult, Read
from .execution.sampler import draw
from .request import Request, Row
from .scheduling.step import Chunk, StepPlan
from .speculation.policy import Asks
from .speculation.tokens_ahead import Mask, Place, ahead, places

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

Progress = tuple[Sequence[Event], FinishReason | None]
"""The events of a row's step, and why it ends. `None`: it continues."""


@dataclass(frozen=True)
class Decoded:
    """Result of a pass of the rows."""

    forward: Forward
    chunk: Chunk | None
    """The mixed chunk."""
    reads: Sequence[PassResult] | Fault = ()
    """Tokens of the last pass; empty if `commit_and_draft` has taken them. A fault: they cannot be
    read, or no pass was launched."""
    read_at: float | None = None
    """When `reads` were read. `None`: there are none."""


def commit_and_draft(engine: Engine, plan: StepPlan) -> tuple[StepPlan, Drafts, float | None]:
    """If drafts pay, read and commit the tokens of the last pass first, because drafts follow them.
    Returns the plan without what ended with them, the drafts, and when they were read, if so."""
    requested: Mapping[Row, Asks] = {}
    read_first, drafting = False, engine.drafting
    alone = any(row.retry_alone for row in plan.rows)
    may_draft = engine.batch.can_verify_drafts and drafting.may_draft(plan) and not alone
    if may_draft:
        seconds_with = engine.scheduler.chunking.with_drafts(plan)
        requested, read_first = drafting.plan_drafts(plan.rows, seconds_with)
    if not (requested or read_first or (plan.rows and engine.batch.drafted_rows)):
        return plan, NO_DRAFTS, None
    found, read_at = attempt(engine.batch.catch_up), engine.clock()
    if isinstance(found, Fault):
        _retry_all(engine, found)
        return engine.scheduler.remaining_plan(plan, readable=False), NO_DRAFTS, read_at
    _take(engine, found, read_at, before=True)
    if not may_draft:
        return engine.scheduler.remaining_plan(plan), NO_DRAFTS, read_at
    drafts = drafting.make_drafts(plan.rows, seconds_with, requested, fails_next)
    return engine.scheduler.remaining_plan(plan), drafts, read_at


def run(engine: Engine, plan: StepPlan, drafts: Drafts, idle_at: float | None) -> Decoded | None:
    """Launch the pass, and read the tokens of the last one while it runs. `idle_at`: when they
    were read before it, so that the device became idle."""
    chunk = plan.chunk if plan.mixed else None
    if not plan.rows and chunk is None:
        return None
    chunking, began = engine.scheduler.chunking, engine.clock()
    count = sum(map(len, drafts.values()))
    expected = chunking.with_drafts(plan)(count) if count else plan.pass_seconds
    mixed_chunk = engine.batch.mixed.begin_pass(chunk)
    # of every row in the batch: `plan.rows`
    forward = attempt(partial(engine.batch.forward, mixed_chunk, drafts))
    if isinstance(forward, Fault):  # the rows' caches could not be copied for it
        return Decoded(Forward([], None, []), chunk, forward)
    load = chunking.load(plan.rows, chunk)
    engine.timer.launch(expected, began if idle_at is None else engine.clock(), load)
    if drafts and idle_at is not None:
        engine.drafting.record_idle(drafts, engine.clock() - idle_at)
    for row in [row for rows, _ in forward.failed for row in rows]:
        row.corrupted = True
    if idle_at is not None:
        return Decoded(forward, chunk)
    return Decoded(forward, chunk, attempt(engine.batch.read), engine.clock())


def commit(engine: Engine, decoded: Decoded) -> None:
    """Take the tokens that were read, and draw the next ones."""
    forward, chunk, reads = decoded.forward, decoded.chunk, decoded.reads
    if isinstance(reads, Fault):
        _retry_all(engine, reads)
        return
    if decoded.read_at is not None:
        _take(engine, reads, decoded.read_at)
    # a row alone in its pass is to blame; otherwise all run again. Without rows, a chunk failed
    for rows, cause in forward.failed:
        left = [row for row in rows if row.finish is None]
        alone = len(rows) == 1 and (chunk is None or rows[0].retry_alone)
        if alone and left:
            engine.fail_by_fault(left[0].request, "its decode step", cause)
        elif left or chunk is not None:
            retry(engine, left, cause)
    recovers = [row for row in forward.rows if row.retry_alone]  # until the draws
    if forward.logits is not None:
        _draw_next(engine, forward, forward.logits)
    engine.timer.token_at = engine.clock()
    if not (forward.failed or recovers):
        engine.batch.record_success(len(forward.rows))


def _take(engine: Engine, found: Sequence[PassResult], now: float, *, before: bool = False) -> None:
    """Take the result of the last pass, perhaps `before` the next one is launched: then rows with
    drafts one by one, after the others, whose caches have all their tokens already."""
    if engine.prefix_cache is not None:
        engine.prefix_cache.record_read()
    with_drafts = any(result.drafts for result in found)
    times = engine.timer.end_rows(now, newer=not before, usual=not with_drafts)
    engine.drafting.record_pass(found, times)
    together = [result for result in found if not (before and result.drafts)]
    take_tokens(engine, [read for result in together for read in result.reads], now)
    for result in found:
        if before and result.drafts:
            _take_drafts(engine, result, now)


def _take_drafts(engine: Engine, result: PassResult, now: float) -> None:
    """Take a row's accepted drafts, token by token."""
    row, accepted = result.row, len(result.reads) - 1
    engine.drafting.record_accepted(row, result.drafts, accepted)
    engine.output.add_drafts(result.drafts, accepted)
    for stay, read in enumerate(result.reads, 1):
        if row.finish is None:
            engine.batch.layout.keep(row, stay)
            take_tokens(engine, [read], now)


def _draw_next(engine: Engine, forward: Forward, logits: mx.array) -> None:
    """Draw a token for every position of the rows, as if all their drafts were accepted."""
    engine.drafting.show(forward)
    scheduler, batch, fixed = engine.scheduler, engine.batch, engine.scheduler.chunking.fixed
    wanted: Sequence[Place] = list(places(forward.rows))
    kept = [  # with fixed passes, a row may have its next token already, to replay it
        i
        for i, (row, _) in enumerate(wanted)
        if row in scheduler.running and not (fixed and batch.replays(row))
    ]
    if len(kept) < len(wanted):
        wanted, logits = [wanted[i] for i in kept], logits[mx.array(kept, dtype=mx.int32)]
    rows = [row for row, _ in wanted]
    if fixed is not None:
        for i, row in enumerate(rows):
            again = partial(retry, engine, [row])
            own = engine.isolate(row.request, "its sampling")
            with own if row.retry_alone else Isolation(again):
                batch.set_drawn([row], draw(logits[i : i + 1], [row], [mask(row, 0)]))
                row.retry_alone = False
    elif rows:
        with Isolation(partial(retry, engine, list(dict.fromkeys(rows)))):
            masks = [mask(row, at, forward.drafts) for row, at in wanted]
            drawn = [ahead(row, forward.drafts.get(row, ()), at) for row, at in wanted]
            batch.set_drawn(rows, draw(logits, drawn, masks), forward.drafts)
            for row in rows:
                row.retry_alone = False  # its own pass has worked


def mask(row: Row, at: int, drafts: Drafts = NO_DRAFTS) -> Mask | None:
    """The grammar's mask after `at` of the row's drafts."""
    if row.constraint is None:
        return None
    if row in drafts:
        return row.masks[at]  # type: ignore[no-any-return]
    with fails_next(row, "its grammar"):
        return row.constraint.mask()
    return None  # its request ends with the next token


# -- tokens


def take_tokens(engine: Engine, reads: Sequence[Read], now: float) -> None:
    live = [read for read in reads if read[0].finish is None]
    for row, token, _ in live:  # before a failure, which stores its request's other rows
        engine.output.add_token(row.request, now)
        engine.scheduler.charge_token(row.request)
        row.tokens.append(token)
    for row, token, logprob in live:
        _advance(engine, row, partial(_push_token, engine, row, token, logprob))


def _push_token(engine: Engine, row: Row, token: int, logprob: Logprob | None) -> Progress:
    request = row.request
    if token in request.stop_tokens:
        return _finish(row, "stop")
    if row.constraint is not None:
        row.constraint.advance(token)
    if row.predictor is not None and engine.batch.can_verify_drafts:
        engine.drafting.follow(row, token)
    described = None if logprob is None else engine.output.describe(token, logprob)
    deltas = list(row.output.push(token, described))
    if row.output.stopped or (row.constraint is not None and row.constraint.finished):
        return _finish(row, "stop", deltas)
    if len(row.tokens) >= request.max_tokens:
        return _finish(row, "length", deltas)
    return deltas, None


def cut(engine: Engine, row: Row) -> None:
    _advance(engine, row, partial(_finish, row, "length"))


def _advance(engine: Engine, row: Row, work: Callable[[], Progress]) -> None:
    """Do the row's own work, post its events, and end the row or its request if need be."""
    request = row.request
    progress: Progress = (), None
    if row.finish is not None:  # another choice made its request fail
        return
    if row.error is None:
        with fails_next(row, "its text"):
            progress = work()
    if row.error is not None:
        engine.fail(request, row.error)
        return
    events, reason = progress
    if events:
        engine.output.post(request, events)
    if reason is None:
        return
    row.finish = reason
    engine.free(request, [row])
    if not request.unfinished_rows:
        engine.output.end(request, reason)


def _finish(row: Row, reason: FinishReason, deltas: Sequence[Delta] = ()) -> Progress:
    last, reason = row.output.finish(reason)
    end = Finish(index=row.index, reason=reason, stop=row.output.stopped or None)
    return [*deltas, *last, end], reason


def fails_next(row: Row, part: str) -> Isolation:
    """Wraps a row's own work. An error in it ends its request as `Row.error` says."""

    def store(fault: Fault) -> None:
        row.error = error_of(row.request, part, fault)

    return Isolation(store)


def error_of(request: Request, part: str, fault: Fault) -> MLXProviderError:
    if not fault.deliberate:
        log.error("request %s: %s failed\n%s", request.id, part, fault.trace)
    return fault.of_request(part)


# -- after a failure


def _retry_all(engine: Engine, fault: Fault) -> None:
    """A pass cannot be read: no cache of its rows can be used, also of those that have ended."""
    lost = set() if engine.prefix_cache is None else engine.prefix_cache.lose_unread()
    for job in engine.scheduler.waiting:
        if any(row.lease is not None and lost.intersection(row.lease.buffers) for row in job.rows):
            job.restart()
    retry(engine, [*engine.scheduler.running], fault)


def retry(engine: Engine, rows: Sequence[Row], fault: Fault) -> None:
    """Prefill the rows of a failed pass again, each alone, and its prompts from their beginning."""
    log.warning("a decode step of %d rows failed (%s); they run again", len(rows), fault.summary)
    engine.timer.forget()
    engine.drop_rows(rows)
    for row in rows:
        row.lease = None  # without `release`, so that its buffers are lost
    for job in engine.scheduler.retry_rows(rows):
        engine.look_up(job)
    engine.batch.record_failure()  # also restarts prompts in the failed pass
