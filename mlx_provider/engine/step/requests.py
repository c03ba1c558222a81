"""Begins and ends requests: prompts get a row cache, tokens become text, computed KV is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import MLXProviderError
from ...isolation import Fault, Isolation
from ...protocol.events import Delta, Event, Finish, FinishReason
from ...upstream.cache_classes import sparse
from ..execution.decode_batch import Logprob, Read
from ..prefix_cache.buffers import Lease
from ..prefix_cache.policy import PrefixCachePolicy
from ..prefix_cache.tree import Match
from ..request import Phase, PrefillJob, Request, Row, Start
from ..row_cache import grow_by
from ..scheduling.record import StoredPrefixes
from ..sparse_prefill import SparsePrefill
from ..step_output import LookedUp

if TYPE_CHECKING:
    from ..engine import Engine

log = logging.getLogger(__name__)


Progress = tuple[Sequence[Event], FinishReason | None]
"""The events of a row's step, and why it ends. `None`: it continues."""


# -- prompts


def look_up(engine: Engine, job: PrefillJob) -> None:
    if engine.prefix_cache is not None and job.uses_prefix_cache:
        with isolated_cache(job.request):
            engine.prefix_cache.look_up(job)


def claim(engine: Engine, job: PrefillJob) -> None:
    if engine.prefix_cache is not None:
        with isolated_cache(job.request):
            engine.prefix_cache.claim(job)


class Previews(StoredPrefixes):
    """How `claim` and `begin` will let a prompt start."""

    def __init__(self, policy: PrefixCachePolicy | None, scorer: SparsePrefill | None) -> None:
        self._policy = policy
        self._scorer = scorer

    def claims(self, job: PrefillJob) -> Sequence[Lease | None]:
        if self._policy is not None:
            with isolated_cache(job.request):
                return self._policy.claims(job)
        return ()

    def preview(self, job: PrefillJob) -> Start:
        found, scorer = Start(0, job.cuts, job.estimated_cached), self._scorer
        if not job.uses_prefix_cache:
            return found
        if self._policy is not None:
            with isolated_cache(job.request):
                found = self._policy.preview(job)
        if not found.waits and scorer is not None and scorer.will_score(job, found.done):
            return Start(0, (), found.estimated, scored=True)
        return found

    def fork_bytes(self, tokens: int, rows: int) -> int:
        return 0 if self._policy is None else self._policy.fork_bytes(tokens, rows)


def begin(engine: Engine, job: PrefillJob) -> None:
    """Give an admitted prompt its row cache, or start a restore from disk."""
    inputs = job.request.inputs
    capacity = len(job.tokens) if inputs else engine.scheduler.ledger.kv_capacity(job)
    if engine.prefix_cache is not None and job.uses_prefix_cache:
        with isolated_cache(job.request) as found:
            _record_lookup(engine, job.request, engine.prefix_cache.begin(job, capacity))
        if found.fault is not None:
            job.leave_prefix()
    if job.restoring:
        return
    if engine.sparse_prefill is not None and job.uses_prefix_cache:
        engine.sparse_prefill.begin(job)
    if not job.uses_prefix_cache:
        job.leave_prefix()
    if job.cache is None:
        job.cache = engine.make_cache()
        grow_by(job.cache, capacity)
    if job.places is not None:
        job.cache = sparse(job.cache)
    if not job.request.ahead:
        engine.recorder.count("prompt_tokens_cached", job.done)


def _record_lookup(engine: Engine, request: Request, found: Match | None) -> None:
    if found is None or request.ahead:
        return
    diverged = found.diverged_at is not None
    seen = LookedUp(engine.clock(), request.id, found.asked, found.shared, found.length, diverged)
    engine.recent.lookups.append(seen)
    for outcome, tokens in seen.lost.items():
        engine.recorder.count("prefix_lookup_tokens", tokens, outcome)


# -- requests


def cancel(engine: Engine, request: Request) -> None:
    if abandon(engine, request):
        engine.output.end(request, "cancelled")


def fail(engine: Engine, request: Request, error: MLXProviderError) -> None:
    if abandon(engine, request):
        engine.output.fail(request, error)


def isolated(engine: Engine, request: Request, part: str) -> Isolation:
    """Wraps a request's own work. An error in it ends only this request."""
    return Isolation(partial(fail_by_fault, engine, request, part))


def fails_next(row: Row, part: str) -> Isolation:
    """Wraps a row's own work. An error in it ends its request with its next token."""
    return Isolation(partial(_fails, row, part))


def isolated_cache(request: Request) -> Isolation:
    """Wraps a use of the prefix cache. An error in it costs only this use."""
    return Isolation(partial(_cache_failed, request))


def fail_by_fault(engine: Engine, request: Request, part: str, fault: Fault) -> None:
    fail(engine, request, _error(request, part, fault))


def abandon(engine: Engine, request: Request) -> bool:
    """End a request without an event, and keep what it has computed. Returns whether it was
    still active."""
    if request.phase is Phase.DONE:
        return False
    for row in request.unfinished:
        row.finish = "cancelled"
    release(engine, request, request.rows)
    if request.ahead:
        request.drop_rows()  # no client reads it
    return True


# -- tokens


def take_tokens(engine: Engine, reads: Sequence[Read], now: float) -> None:
    live = [read for read in reads if read[0].finish is None]
    for row, token, _ in live:  # before any row ends, because its request's others are stored
        engine.output.add_token(row.request, now)
        row.tokens.append(token)
    for row, token, logprob in live:
        _advance(engine, row, partial(_push_token, engine), token, logprob)


def _push_token(engine: Engine, row: Row, token: int, logprob: Logprob | None) -> Progress:
    request = row.request
    if token in request.stop_tokens:
        return _last(row, "stop")
    if row.constraint is not None:
        row.constraint.advance(token)
    engine.drafting.follow(row, token)
    described = None
    if logprob is not None:
        described = engine.token_names.describe(token, logprob)
    deltas = list(row.output.push(token, described))
    if row.output.stopped or (row.constraint is not None and row.constraint.finished):
        return _last(row, "stop", deltas)
    if len(row.tokens) >= request.max_tokens:
        return _last(row, "length", deltas)
    return deltas, None


def cut(engine: Engine, row: Row) -> None:
    _advance(engine, row, _last, "length")


def _advance(engine: Engine, row: Row, work: Callable[..., Progress], *how: Any) -> None:
    """Do the row's own work, post its events, and end the row or its request if need be."""
    request = row.request
    progress: Progress = (), None
    if row.finish is not None:  # another choice made its request fail
        return
    if row.error is None:
        with fails_next(row, "its text"):
            progress = work(row, *how)
    if row.error is not None:
        fail(engine, request, row.error)
        return
    events, reason = progress
    if events:
        engine.output.post(request, events)
    if reason is None:
        return
    row.finish = reason
    release(engine, request, [row])
    if not request.unfinished:
        engine.output.end(request, reason)


# -- endings


def release(engine: Engine, request: Request, rows: Sequence[Row]) -> None:
    """Free the resources of rows: their place in the batch, or their prefill."""
    scheduler = engine.scheduler
    running = [row for row in rows if row in scheduler.running]
    store(engine, request, running)
    if engine.prefix_cache is not None:  # rows may end with their first token
        failed = engine.corrupted
        intact = [row for row in rows if row not in failed and not row.retry_alone]
        engine.prefix_cache.give_back(intact)
    drop_rows(engine, running)
    scheduler.remove_rows(running)
    for row in rows:
        row.lease = None
    if not request.unfinished:
        for job in scheduler.remove_request(request):
            job.restart()  # references to its last passes then keep no cache alive
        request.features = {}


def drop_rows(engine: Engine, rows: Sequence[Row]) -> None:
    engine.batch.drop(rows)
    engine.drafting.forget(rows)
    engine.charge_merged()
    for row in rows:
        row.lease, row.merged = None, 0


def store(engine: Engine, request: Request, running: Sequence[Row]) -> None:
    """Store what rows and prefills of a request have computed in the prefix cache."""
    if engine.prefix_cache is None:
        return
    with isolated_cache(request):
        for row in running:
            cached = engine.batch.cached_tokens(row)
            if row in engine.corrupted:
                continue
            if cached:
                own = engine.batch.extract(row)
                engine.prefix_cache.keep_row(row, row.tokens[:cached], own)
            engine.prefix_cache.give_back([row])
        for job in engine.scheduler.waiting:
            if job.request is request and not request.unfinished:
                engine.prefix_cache.keep_prefill(job)
                engine.prefix_cache.give_back(job.rows)


def _last(row: Row, reason: FinishReason, deltas: Sequence[Delta] = ()) -> Progress:
    last, reason = row.output.finish(reason)
    end = Finish(index=row.index, reason=reason, stop=row.output.stopped or None)
    return [*deltas, *last, end], reason


def _fails(row: Row, part: str, fault: Fault) -> None:
    row.error = _error(row.request, part, fault)


def _error(request: Request, part: str, fault: Fault) -> MLXProviderError:
    if not fault.ours:
        log.error("request %s: %s failed\n%s", request.id, part, fault.trace)
    return fault.of_request(part)


def _cache_failed(request: Request, fault: Fault) -> None:
    log.error("request %s: the prefix cache failed\n%s", request.id, fault.trace)
