"""Decode step: run the forward pass of all rows and of a mixed chunk, and draw their next tokens.

A pass is launched before the tokens of the previous one are read, so that the device does not wait
for the host. Only drafts need those tokens first. Each step calls `commit_and_draft`, `launch_pass`
and `commit`, in this order.

If results cannot be read, all rows and unread chunks run again. If a draw fails, or a pass with
several rows or a chunk, its rows run again, each alone until it has decoded once (`retry_alone`). A
failed pass of one row, or its second failed draw, ends its request. `retry` drops the rows and
their leases, stores nothing of them, and requeues them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from ..isolation import Fault, attempt
from ..protocol.events import Delta, Event, Finish, FinishReason
from .execution.decode_batch import NO_DRAFTS, Drafts, Forward, Logprob, PassResult, Read
from .execution.sampler import draw
from .request import Row
from .scheduling.step import Chunk, StepPlan
from .speculation.drafted_tokens import Mask, Place, let_through, places, row_with_drafts

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

Progress = tuple[Sequence[Event], FinishReason | None]
"""The events of a row's step, and why it ends. `None`: it continues."""


@dataclass(frozen=True)
class LaunchedPass:
    """The pass of the rows that runs now, and the results of the one before."""

    forward: Forward
    chunk: Chunk | None
    """The mixed chunk."""
    previous_results: Sequence[PassResult] = ()
    read_at: float | None = None
    """When these were read. `None`: there are none, as `commit_and_draft` has taken them."""
    fault: Fault | None = None
    """Nothing was launched, or the previous results are unreadable."""


def commit_and_draft(engine: Engine, plan: StepPlan) -> tuple[StepPlan, Drafts, float | None]:
    """If the previous pass had drafts, drafters will be asked for some, or text is predicted, read
    and commit that pass's tokens first; else do nothing. Returns the remaining plan, the drafts,
    and when the tokens were committed (`None`: `launch_pass` reads them)."""
    drafting, batch = engine.drafting, engine.batch
    make_drafts: Callable[[], Drafts] | None = None
    needs_tokens = bool(plan.rows and batch.drafted_rows)
    retrying = any(row.retry_alone for row in plan.rows)
    if not retrying and batch.can_verify_drafts and drafting.may_draft(plan):
        seconds_for = engine.scheduler.chunking.with_drafts(plan)
        requested, predicts_text = drafting.plan_drafts(plan.rows, seconds_for)
        make_drafts = partial(drafting.make_drafts, plan.rows, seconds_for, requested)
        needs_tokens = bool(needs_tokens or requested or predicts_text)
    if not needs_tokens:
        return plan, NO_DRAFTS, None
    results, now = attempt(batch.catch_up), engine.clock()
    if isinstance(results, Fault):
        _retry_all(engine, results)  # which also starts a mixed chunk's prompt again
        return engine.scheduler.remaining_plan(plan, keep_mixed=False), NO_DRAFTS, now
    _commit_results(engine, results, now, launched=False)
    drafts = NO_DRAFTS if make_drafts is None else make_drafts()
    return engine.scheduler.remaining_plan(plan), drafts, now


def launch_pass(
    engine: Engine, plan: StepPlan, drafts: Drafts, committed_at: float | None
) -> LaunchedPass | None:
    """Launch the pass, and read the previous tokens while it runs, unless they were committed
    before. `committed_at`: when; the device has been idle since."""
    if not plan.rows:
        return None
    chunk = plan.chunk if plan.mixed else None
    launched = attempt(partial(_launch, engine, plan, chunk, drafts, committed_at))
    if isinstance(launched, Fault):  # caches could not be joined, or the previous pass has failed
        return LaunchedPass(Forward([], None, []), chunk, fault=launched)
    return launched


def commit(engine: Engine, launched: LaunchedPass) -> None:
    """Take the tokens that were read, fail or retry the rows of failed passes, and draw the next
    tokens of the others."""
    forward, chunk = launched.forward, launched.chunk
    if launched.fault is not None:
        _retry_all(engine, launched.fault)
        return
    if launched.read_at is not None:
        _commit_results(engine, launched.previous_results, launched.read_at, launched=True)
    for rows, cause in forward.failed:
        unfinished = [row for row in rows if row.finish is None]
        if unfinished and len(rows) == 1 and chunk is None:
            engine.fail_by_fault(unfinished[0].request, "its decode step", cause)
        elif unfinished or chunk is not None:
            retry(engine, unfinished, cause)  # and `record_failure` restarts the chunk's prompt
    retried = any(row.retry_alone for row in forward.rows)  # a draw that works clears it
    drew = forward.logits is None or _draw_next(engine, forward, forward.logits)
    engine.timer.token_at = engine.clock()
    if drew and not (retried or forward.failed):
        engine.batch.record_success(len(forward.rows))


# -- launch, results, draws and drafts


def _launch(
    engine: Engine, plan: StepPlan, chunk: Chunk | None, drafts: Drafts, committed_at: float | None
) -> LaunchedPass:
    chunking, began = engine.scheduler.chunking, engine.clock()
    count = sum(map(len, drafts.values()))
    expected = chunking.with_drafts(plan)(count) if count else plan.pass_seconds
    # runs all rows of the batch, which are `plan.rows`
    forward = engine.batch.forward(engine.batch.mixed.begin_pass(chunk), drafts)
    pass_load = chunking.load(plan.rows, chunk)
    engine.timer.launch(expected, began if committed_at is None else engine.clock(), pass_load)
    if drafts and committed_at is not None:
        engine.drafting.record_idle(drafts, engine.clock() - committed_at)
    for row in [row for rows, _ in forward.failed for row in rows]:
        row.corrupted = True
    if committed_at is not None:
        return LaunchedPass(forward, chunk)
    # `read` waits for the tokens of the pass before
    return LaunchedPass(forward, chunk, engine.batch.read(), engine.clock())


def _commit_results(
    engine: Engine, results: Sequence[PassResult], now: float, *, launched: bool
) -> None:
    """`launched`: the next pass runs already. Then no row has drafts. Else rows with drafts come
    last, one by one: their caches are cut to the accepted drafts."""
    if engine.prefix_cache is not None:
        engine.prefix_cache.record_read()
    drafts = sum(result.drafts for result in results)
    times = engine.timer.end_rows(now, newer=launched, usual=not drafts)
    engine.drafting.record_pass(drafts, times)
    together = [result for result in results if not result.drafts]
    take_tokens(engine, [read for result in together for read in result.reads], now)
    for result in results:
        if result.drafts:
            _take_drafts(engine, result, now)


def _take_drafts(engine: Engine, result: PassResult, now: float) -> None:
    row, accepted = result.row, len(result.reads) - 1
    engine.drafting.record_accepted(row, result.drafts, accepted)
    engine.output.add_drafts(result.drafts, accepted)
    for tokens, read in enumerate(result.reads, 1):
        if row.finish is None:
            engine.batch.layout.keep_tokens(row, tokens)
            take_tokens(engine, [read], now)


def _draw_next(engine: Engine, forward: Forward, logits: mx.array) -> bool:
    """Draw a token for every position of the rows, as if the drafts before it were accepted: all
    together, but after a failure, and in fixed passes, one by one. Returns whether all worked."""
    engine.drafting.record_hidden_states(forward)
    running, batch, fixed = engine.scheduler.running, engine.batch, engine.scheduler.chunking.fixed
    positions = list(places(forward.rows))
    indices = [  # in fixed passes, a replayed row has its next token already
        i
        for i, (row, _) in enumerate(positions)
        if row in running and not (fixed and batch.replays(row))
    ]
    if len(indices) < len(positions):
        logits = logits[mx.array(indices, dtype=mx.int32)]
        positions = [positions[i] for i in indices]
    rows = list(dict.fromkeys(row for row, _ in positions))
    if fixed is not None or batch.decodes_apart or any(row.retry_alone for row in rows):
        for i, place in enumerate(positions):
            _draw_alone(engine, logits[i : i + 1], place, forward.drafts)
    elif rows:
        fault = attempt(partial(_draw, engine, logits, positions, forward.drafts))
        if fault is not None:
            retry(engine, rows, fault)
    return not any(row.retry_alone for row in rows)


def _draw_alone(engine: Engine, logits: mx.array, place: Place, drafts: Drafts) -> None:
    row, _ = place
    if row not in engine.scheduler.running:  # the draw of another choice has ended its request
        return
    fault = attempt(partial(_draw, engine, logits, [place], drafts))
    if fault is not None and row.retry_alone:
        engine.fail_by_fault(row.request, "its sampling", fault)
    elif fault is not None:
        retry(engine, [row], fault)


def _draw(engine: Engine, logits: mx.array, positions: Sequence[Place], drafts: Drafts) -> None:
    masks = [ask_grammar(row, before, drafts) for row, before in positions]
    draft_rows = [row_with_drafts(row, drafts.get(row, ()), n) for row, n in positions]
    rows = [row for row, _ in positions]
    engine.batch.set_drawn(rows, draw(logits, draft_rows, masks), drafts)
    for row in rows:
        row.retry_alone = False  # its own pass has worked


def ask_grammar(row: Row, before: int = 0, drafts: Drafts = NO_DRAFTS) -> Mask | None:
    """The grammar's mask for the token after `before` of the row's drafts."""
    if row.constraint is None:
        return None
    if row not in drafts:  # else `make_drafts` has asked the grammar
        let_through(row, ())
    return row.masks[before] if row.masks else None


# -- tokens


def take_tokens(engine: Engine, reads: Sequence[Read], now: float) -> None:
    unfinished = [read for read in reads if read[0].finish is None]
    for row, token, _ in unfinished:  # all first: a failure below stores its request's other rows
        engine.output.add_token(row.request, now)
        engine.scheduler.charge_token(row.request)
        row.tokens.append(token)
    for row, token, logprob in unfinished:
        _apply(engine, row, partial(_push_token, engine, row, token, logprob))


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


def finish_by_length(engine: Engine, row: Row) -> None:
    _apply(engine, row, partial(_finish, row, "length"))


def _apply(engine: Engine, row: Row, work: Callable[[], Progress]) -> None:
    """Do the row's work, post its events, and end the row, or on an error its request."""
    request = row.request
    progress: Progress = (), None
    if row.finish is not None:  # another choice made its request fail
        return
    if row.error is not None:
        engine.fail(request, row.error)
        return
    with engine.isolate(request, "its text"):
        progress = work()
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


# -- after a failure


def _retry_all(engine: Engine, fault: Fault) -> None:
    """A pass cannot be read: no cache of its rows can be used, also of those that have ended."""
    lost = set() if engine.prefix_cache is None else engine.prefix_cache.lose_unread()
    for job in engine.scheduler.waiting:
        if any(row.lease is not None and lost.intersection(row.lease.buffers) for row in job.rows):
            job.restart()
    retry(engine, [*engine.scheduler.running], fault)


def retry(engine: Engine, rows: Sequence[Row], fault: Fault) -> None:
    """Requeue the rows of a failed pass, still admitted, each to run alone; prompts start over."""
    text = "a decode step failed (%s); its rows (%d unfinished) and prompts run again"
    log.warning(text, fault.summary, len(rows))
    engine.timer.forget()
    engine.drop_rows(rows)
    for row in rows:
        row.lease = None  # without `release`, so that its buffers are lost
    for job in engine.scheduler.retry_rows(rows):
        engine.look_up(job)
    engine.batch.record_failure()  # also restarts prompts in the failed pass
