"""The prefill of a prompt: its row cache, its chunks, and the first tokens of its rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from ..errors import RequestFailed
from ..isolation import Fault, attempt
from ..protocol.events import Delta
from ..records import PrefillChunk, PromptLogitsModel
from ..upstream.cache_classes import sparse
from . import decode
from .execution.decode_batch import Forward, Logprob, Pending, read_drawn, read_logprobs
from .execution.grouped_kv import MixedChunk
from .execution.sampler import Drawn, draw, score
from .inputs import Inputs
from .prefix_cache.tree import Match
from .request import PrefillJob, Request, Row
from .row_cache import arrays, grow_by
from .scheduling.step import Chunk, StepPlan
from .sparse_prefill import run_alone

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

LONG_PREFILL_TOKENS = 2048
"""After so many tokens, MLX frees its buffers: decoding uses no buffers of their size."""


@dataclass(frozen=True)
class ChunkResult:
    """Result of a chunk in its own pass."""

    job: PrefillJob
    chunk: Chunk | None = None
    """`None`: the chunk, or the work before it, has failed."""
    logits: mx.array | None = None
    """(vocab,) after the last chunk of a prompt."""
    predicted: Drawn | None = None
    """The prompt tokens that the chunk predicts, if their log-probabilities are wanted."""
    fault: Fault | None = None


def begin(engine: Engine, job: PrefillJob) -> None:
    """Give an admitted prompt its row cache, with a stored prefix (`PrefixCachePolicy.begin`). If
    that starts a restore from disk, a later record has the prompt in `to_begin` again."""
    inputs = job.request.inputs
    capacity = len(job.tokens) if inputs else engine.scheduler.ledger.capacity_for(job)
    match = _fill(engine, job, capacity)
    if job.restoring:
        return
    if job.cache is None:
        job.cache = engine.make_cache()
        grow_by(job.cache, capacity)
    if job.positions is not None:
        job.cache = sparse(job.cache)
    if match is not None:  # else its look-up has been counted
        engine.output.add_lookup(match)
        engine.output.recorder.count("prompt_tokens_cached", job.computed_tokens)


def run(engine: Engine, plan: StepPlan) -> ChunkResult | None:
    """Launch the chunk with its own pass, or do what comes before the chunks of a prompt."""
    job, chunk = plan.prepared, None if plan.mixed else plan.chunk
    work: Callable[[], ChunkResult | None]
    if job is not None and job.cache is not None:
        work = partial(_prepare, engine, job, plan)
    elif chunk is not None and chunk.due:  # else its request ended, or a failed pass corrupted it
        job, work = chunk.job, partial(_run_chunk, engine, chunk, plan)
    else:
        return None
    found = attempt(work)
    return ChunkResult(job, fault=found) if isinstance(found, Fault) else found


def commit(engine: Engine, result: ChunkResult) -> None:
    """Count the chunk. After the last one, let the prompt's rows decode, or take the vector of an
    input. A failure that shows here ends only its request."""
    job, chunk, request = result.job, result.chunk, result.job.request
    if result.fault is not None:
        engine.timer.forget()
        job.drop_cache()  # corrupted, so it must not reach the prefix cache
        engine.fail_by_fault(request, "its prefill", result.fault)
    if chunk is None:
        return
    with engine.isolate(request, "its prefill"):
        if job.wants_prompt_logprobs:
            _post_prompt_logprobs(engine, chunk, result.predicted)
        job.computed_tokens = chunk.stop
        engine.scheduler.charge_chunk(chunk)
        engine.output.add_chunk(chunk)
        if engine.prefix_cache is not None and job.uses_prefix_cache:
            engine.prefix_cache.after_pass(job, chunk.start)
        if chunk.stop < len(job.tokens):
            return
        if request.inputs is not None:
            _end_input(engine, job, request.inputs)
        elif request.background:
            engine.abandon(request)
        elif result.logits is not None:
            _end_prefill(engine, job, result.logits)


def _end_prefill(engine: Engine, job: PrefillJob, logits: mx.array) -> None:
    """Store the prompt, make caches for its rows, draw their first tokens, and let them decode."""
    if not engine.scheduler.running:
        engine.timer.token_at = engine.clock()
    job.request.features = {}
    for span in job.request.prompt.spans:
        if span.ready is not None:
            span.ready.drop()
    if engine.prefix_cache is not None:
        engine.prefix_cache.keep_prefill(job)
    if job.request.prefilled_tokens >= LONG_PREFILL_TOKENS:
        mx.clear_cache()
    cache, job.cache = job.row_cache(), None  # so that no end of the request stores it again
    grow_by(cache, engine.scheduler.ledger.growth_for(job))
    engine.scheduler.end_prefill(job)
    if engine.prefix_cache is not None:
        needed = engine.scheduler.ledger.kv_needed(job.rows[0])  # no room for later turns
        caches = engine.prefix_cache.fork(job.rows, cache, needed)
    else:
        caches = [cache, *(copy.deepcopy(cache) for _ in job.rows[1:])]
    for row, row_cache in zip(job.rows, caches, strict=True):
        if row.length_to_cache == len(job.tokens):  # else it is reproducible: its reply runs again
            _draw_first(engine, row, logits)
            engine.drafting.begin(row, job)
        if row.finish is None:
            engine.scheduler.add_row(row)
            engine.batch.join(row, row_cache, len(job.tokens))


# -- chunks, first tokens and stored prefixes


def _run_chunk(engine: Engine, chunk: Chunk, plan: StepPlan) -> ChunkResult:
    """Append the chunk to its row's cache. Waits for it if what comes next needs its result, or if
    no row decodes, which would show a fault when its next token is read."""
    job, last, prefixes = chunk.job, chunk.stop == len(chunk.job.tokens), engine.prefix_cache
    media = [s for s in job.prompt.spans if s.start < chunk.stop and s.end > chunk.start]
    load = engine.scheduler.chunking.load((), chunk)
    engine.timer.launch(plan.chunk_seconds, engine.clock(), load)
    logits, scored, wanted = _forward(engine, chunk)
    if not last:
        wanted = [*arrays(job.row_cache()), *wanted]
    elif logits is not None:
        wanted += [logits, *job.hidden]
    copies = prefixes is not None and prefixes.copies_after(job, chunk.start, chunk.stop)
    if plan.rows and engine.scheduler.running and not (last or media or copies):
        mx.async_eval(wanted)  # type: ignore[no-untyped-call]
        engine.batch.mixed.may_fail_later(job)
    else:
        mx.eval(wanted)
        if media:  # a family may run a whole image with its first tokens, and others without cost
            engine.timer.forget()
        engine.timer.end(engine.clock())
    return ChunkResult(job, chunk, logits if last else None, scored)


def commit_mixed(engine: Engine, chunk: Chunk, forward: Forward) -> None:
    """Like `commit`, for a chunk that ran with the rows. If it failed, its prompt starts again."""
    job, logits = chunk.job, forward.chunk_logits
    if not (forward.took_chunk and chunk.due):
        return
    job.hidden = [] if forward.chunk_hidden is None else [forward.chunk_hidden]
    prefixes, wanted = engine.prefix_cache, [] if logits is None else [logits]
    if prefixes is not None and prefixes.copies_after(job, chunk.start, chunk.stop):
        wanted += arrays(job.row_cache())  # a fault must not pass as one of the prefix cache
    failed = attempt(partial(mx.eval, wanted))
    if isinstance(failed, Fault):
        log.warning("request %s starts its prefill again: %s", job.request.id, failed.summary)
        engine.batch.mixed.restart_prompts()
    else:
        commit(engine, ChunkResult(job, chunk, logits))


def _draw_first(engine: Engine, row: Row, logits: mx.array) -> None:
    """Draw and take the first token of a row. Its first pass is in the next step."""
    if row.finish is not None:  # another choice of its request has failed
        return
    with engine.isolate(row.request, "its sampling") as work:
        drawn = draw(logits[None], [row], [decode.ask_grammar(row)])
        (first,) = read_drawn(drawn, {row: Pending(drawn, 0, committed=False)})
    if work.fault is None:
        decode.take_tokens(engine, first.reads, engine.clock())


def _fill(engine: Engine, job: PrefillJob, capacity: int) -> Match | None:
    """Give the prompt a row cache with a stored prefix, or start a restore. Returns the match if it
    is to be reported. With sparse prefill, the prompt is first scored instead if its look-up finds
    little; this is decided again if less was restored, as files may be damaged."""
    match, restored = None, job.restore is not None
    if engine.sparse_prefill is not None and not restored:
        engine.look_up(job)
        _choose_sparse(engine, job, job.estimated_cached)
    expected = job.estimated_cached
    if engine.prefix_cache is None or not job.uses_prefix_cache:
        job.leave_prefix()
    else:
        match = engine.prefix_cache.begin(job, capacity)
    if not job.restoring and (restored or job.computed_tokens < expected):
        _choose_sparse(engine, job, job.computed_tokens)
    return match


# -- sparse prefill, images, prompt log-probabilities and inputs


def _forward(engine: Engine, chunk: Chunk) -> tuple[mx.array | None, Drawn | None, list[mx.array]]:
    """Launch the chunk. Returns logits (vocab,) after it, the prompt tokens that it predicts, if
    they are wanted, and what else it computes, not evaluated."""
    job, request = chunk.job, chunk.job.request
    part = PrefillChunk(job.prompt, chunk.start, chunk.stop, job.row_cache(), request.features)
    if request.inputs is not None:
        request.inputs.run(engine.model, part)
        return None, None, [] if request.inputs.found is None else [request.inputs.found]
    if job.wants_prompt_logprobs:
        logits, scored = _score(engine, part, request)
        return logits, scored, [] if scored is None else scored.arrays
    if job.positions is not None:
        return run_alone(engine.model, MixedChunk.of(chunk)), None, []
    return engine.drafting.prefill(engine.model, job, part), None, []


def _choose_sparse(engine: Engine, job: PrefillJob, cached: int) -> None:
    """Let the prompt be scored, without a stored prefix, if few of its tokens are `cached`."""
    if engine.sparse_prefill is not None and job.uses_prefix_cache:
        engine.sparse_prefill.begin(job, cached)
        if job.scoring is not None:
            engine.end_leases(job.rows)
            job.leave_prefix()


def _prepare(engine: Engine, job: PrefillJob, plan: StepPlan) -> None:
    seconds, began = plan.preparing_seconds, engine.clock()
    if job.spans_to_embed:
        _run_tower(engine, job, seconds)
    elif job.scoring is not None and engine.sparse_prefill is not None:
        engine.sparse_prefill.advance(job, seconds)
        if job.scoring is None:
            grow_by(job.row_cache(), engine.scheduler.ledger.capacity_for(job))
            engine.output.recorder.count("tokens_skipped", job.request.skipped_tokens)
    engine.scheduler.charge_preparation(plan, engine.clock() - began)
    engine.timer.forget()  # this time is not that of a pass


def _run_tower(engine: Engine, job: PrefillJob, seconds: float) -> None:
    """Take cached features. Of the other media, run one through the tower, and more while another
    of their average time ends within `seconds`."""
    began, ran = engine.clock(), 0
    for span in job.spans_to_embed:
        key = (job.request.salt, span.content_hash)
        features = engine.features.get(key)
        if features is None:
            if ran and (engine.clock() - began) * (1 + 1 / ran) > seconds:
                return
            features, ran = engine.model.embed(span), ran + 1
            engine.features.put(key, features)
        job.request.features[span.content_hash] = features


def _score(engine: Engine, chunk: PrefillChunk, request: Request) -> tuple[mx.array, Drawn | None]:
    """Append a chunk. Returns logits (vocab,) after it, and the prompt tokens that it predicts."""
    model = engine.model
    if not isinstance(model, PromptLogitsModel):
        raise RequestFailed("the model does not tell how likely a prompt's tokens were")
    logits = model.prefill_logits(chunk)
    following = mx.array(list(chunk.prompt.tokens[chunk.start + 1 : chunk.stop + 1]), mx.int32)
    scored = score(logits[: following.size], following, request.rows[0])
    return logits[-1], scored if following.size else None


def _post_prompt_logprobs(engine: Engine, chunk: Chunk, scored: Drawn | None) -> None:
    """Post the log-probabilities of the tokens that a chunk predicts; with the first chunk, also
    the first token of the prompt. A restarted prefill sends no token again."""
    request, describe = chunk.job.request, engine.output.describe
    tokens = request.prompt.tokens
    following = tokens[chunk.start + 1 : chunk.stop + 1]
    # nothing predicts the first token
    found = [describe(tokens[0], Logprob(None, ()))] if chunk.start == 0 else []
    if scored is not None:
        found += map(describe, following, read_logprobs(scored).values())
    new = max(0, chunk.start + 1 + len(following) - request.prompt_logprobs_sent)
    request.prompt_logprobs_sent += new
    for row in request.rows:
        engine.output.post(request, [Delta(index=row.index, logprobs=found[len(found) - new :])])


def _end_input(engine: Engine, job: PrefillJob, inputs: Inputs) -> None:
    request = job.request
    engine.output.post(request, [inputs.finish()])
    if inputs.left:
        job.restart()
        job.tokens = inputs.tokens[inputs.at]
        begin(engine, job)
        return
    for row in request.rows:
        row.finish = "stop"
    engine.free(request, request.rows)
    engine.output.end(request, "stop")
    if request.prefilled_tokens >= LONG_PREFILL_TOKENS:
        mx.clear_cache()
