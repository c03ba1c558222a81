"""Live statistics, collected in the caller's thread. Only the prefix tree comes from the engine
thread, between two steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from os import getpid
from statistics import median

import mlx.core as mx

from ..engine.memory import memory_limit
from ..engine.recent import LookedUp, Step
from ..engine.request import Phase, Request
from ..protocol.figures import (
    EngineFigures,
    Figures,
    LoadingFigures,
    Lookup,
    MemoryFigures,
    MissReason,
    ModelMemory,
    PrefixCacheFigures,
    RequestFigures,
    RequestState,
    StepFigures,
)
from .in_flight import Entry
from .weights import EngineInstance, Weights

WINDOW = 10.0
"""Seconds of recent steps."""
STEPS_TOLD = 120
LOOKUPS_TOLD = 12
STATES: dict[Phase, RequestState] = {
    Phase.WAITING: "queued",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
}
REASONS: dict[str, MissReason] = {"cold": "cold", "diverged": "diverged", "no_state": "no_state"}


def take(
    entries: Sequence[Entry],
    weights: Sequence[Weights],
    cache: PrefixCacheFigures,
    loading: list[LoadingFigures],
    *,
    device: str,
    chosen_limit: int | None,
    media: int,
) -> Figures:
    """`media`: bytes of images held by requests."""
    now = time.monotonic()
    engines = [(each, kind, run) for each in weights for kind, run in list(each.engines.items())]
    seen = [found for _, _, run in engines for found in run.engine.recent.lookups.items()]
    seen.sort(reverse=True)
    return Figures(
        at=time.time(),
        version=version("mlx-provider"),
        device=device,
        pid=getpid(),
        requests=[summary for entry in entries if (summary := _request(entry, now)) is not None],
        engines=[_engine(each.name, kind, run, now) for each, kind, run in engines],
        loading=loading,
        prefix_cache=cache.model_copy(
            update={"recent": [_lookup(found, now) for found in seen[:LOOKUPS_TOLD]]}
        ),
        memory=MemoryFigures(
            limit=memory_limit(chosen_limit),
            active=mx.get_active_memory(),
            pool=mx.get_cache_memory(),
            prefix_cache=cache.bytes,
            media=media,
            models=[_memory(each) for each in weights],
        ),
    )


def _request(entry: Entry, now: float) -> RequestFigures | None:
    active = entry.active
    if active is None:
        age = now - entry.arrived
        return RequestFigures(
            id=entry.id, model=entry.model, state="preparing", age=age, queued=age
        )
    request, model = active.request, active.lease.view.weights.name
    state = STATES.get(request.phase)
    if state is None:
        return None
    return RequestFigures(
        id=entry.id,
        model=model,
        state=state,
        choices=len(request.rows),
        prompt_tokens=len(request.prompt.tokens),
        cached_tokens=request.cached,
        prefilled_tokens=request.prefilled,
        completion_tokens=request.completion_tokens,
        tokens_per_second=_rate(request),
        drafted_tokens=request.drafted,
        accepted_tokens=request.accepted,
        age=now - entry.arrived,
        queued=(now if request.started is None else request.started) - entry.arrived,
    )


def _rate(request: Request) -> float:
    first, last = request.first_token, request.last_token
    if first is None or last is None or last <= first:
        return 0.0
    return max(0, request.completion_tokens - len(request.rows)) / (last - first)


def _engine(model: str, kind: str, instance: EngineInstance, now: float) -> EngineFigures:
    engine = instance.engine
    steps = [step for step in engine.recent.steps.items() if now - step.ended <= WINDOW]
    spent = [step.seconds for step in steps]
    span = max(1.0, now - steps[0].ended + steps[0].seconds) if steps else 1.0
    return EngineFigures(
        model=model,
        kind=kind,
        layout=engine.batch.layout.name,
        mixes=engine.mixes,
        queued=engine.scheduler.queued + len(instance.arriving),
        rows=engine.scheduler.active_rows,
        steps=[_step(step, now) for step in steps[-STEPS_TOLD:]],
        step_median=median(spent) if spent else 0.0,
        step_longest=max(spent, default=0.0),
        decoded_per_second=sum(step.tokens for step in steps) / span,
        prefilled_per_second=sum(step.chunk for step in steps) / span,
        drafter=instance.drafter,
        drafted_tokens=engine.recent.drafted,
        accepted_tokens=engine.recent.accepted,
        ahead_tokens=engine.recent.ahead,
    )


def _step(step: Step, now: float) -> StepFigures:
    return StepFigures(
        ago=now - step.ended,
        seconds=step.seconds,
        rows=step.rows,
        tokens=step.tokens,
        chunk=step.chunk,
        mixed=step.mixed,
    )


def _lookup(found: LookedUp, now: float) -> Lookup:
    return Lookup(
        request=found.request,
        ago=now - found.at,
        prompt_tokens=found.asked,
        cached_tokens=found.reused,
        stored_tokens=found.shared,
        reason=_reason(found),
    )


def _reason(found: LookedUp) -> MissReason:
    lost = {name: tokens for name, tokens in found.lost.items() if name in REASONS and tokens}
    return REASONS[max(lost, key=lost.__getitem__)] if lost else ""


def _memory(weights: Weights) -> ModelMemory:
    return ModelMemory(
        model=weights.name,
        weights=max(weights.taken, weights.info.weights_bytes),
        drafters=sum(each.drafter_bytes for each in list(weights.engines.values())),
        rows=weights.live_bytes,
        features=weights.features.nbytes,
    )
