"""The requests in flight, the progress of loads, and the live statistics of the engine. These are
collected in the caller's thread; only the prefix cache's come from the engine thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from os import getpid
from typing import TYPE_CHECKING

import mlx.core as mx

from ..chat.media.load import MediaClaim
from ..engine.request import Phase, Request
from ..engine.step_output import timings_of
from ..errors import BadRequest, RequestFailed
from ..protocol.event_queue import EventQueue
from ..protocol.events import Failed
from ..protocol.health import (
    EngineStats,
    LoadingStats,
    MemoryStats,
    ModelMemory,
    RequestState,
    RequestStats,
    Stats,
)
from .next_prompt import ToolTurn
from .residents import Lease
from .weights import EngineInstance, ModelView, Weights

if TYPE_CHECKING:
    from .model_cache import ModelCache


@dataclass(frozen=True)
class Active:
    request: Request
    model: str
    lease: Lease
    instance: EngineInstance


@dataclass(eq=False)
class Entry:
    """A request from its arrival to its last event."""

    id: str
    queue: EventQueue
    media: MediaClaim
    model: str
    arrived: float  # monotonic seconds
    active: Active | None = None  # `None` during its preparation, until it is admitted
    turn: ToolTurn | None = None  # set if the reply may end with calls

    def check_wanted(self) -> None:
        """Raise `RequestFailed` if nobody waits for its events any more."""
        if self.queue.ended:
            raise RequestFailed.cancellation()

    def let_go(self) -> None:
        """Release its image memory and its lease on a model. Idempotent."""
        self.media.close()
        if self.active is not None:
            self.active.lease.release()


class InFlight:
    """The entries of all requests in flight. Safe from any thread."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        """Of the entries, and of `EngineInstance.arriving`."""

    def arrive(self, entry: Entry) -> None:
        """Add an entry. Raises `BadRequest` if its id is in use, because clients cancel by id."""
        with self._lock:
            if self._entries.setdefault(entry.id, entry) is not entry:
                raise BadRequest("another request with this id is being served", param="id")

    def enter(self, entry: Entry, request: Request, view: ModelView, lease: Lease) -> Active:
        """Admit the request of an entry to its engine's queue. Raises the errors of the scheduler's
        `check`, and `RequestFailed` if nobody waits for it any more."""
        instance = view.weights.instance
        with self._lock:
            entry.check_wanted()
            instance.engine.scheduler.check(request, instance.arriving)
            instance.arriving.append(request.tenant)
            entry.active = Active(request, view.weights.name, lease, instance)
            return entry.active

    def reach_engine(self, active: Active) -> None:
        """From now on, the scheduler counts the request, not `arriving`."""
        with self._lock:
            active.instance.arriving.remove(active.request.tenant)

    def cancel(self, name: str) -> Entry | None:
        """The entry of this id; `None`: there is none. Ends its events if it is in preparation; the
        caller ends an admitted request."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.active is None:
                entry.queue.put([Failed.of(RequestFailed.cancellation())])
            return entry

    def of(self, request: Request) -> tuple[Entry, Active] | None:
        """The entry of this admitted request, with its `active`. `None`: the request has ended."""
        entry = self._entries.get(request.id)
        if entry is None or entry.active is None or entry.active.request is not request:
            return None
        return entry, entry.active

    def active(self) -> list[Active]:
        with self._lock:
            return [entry.active for entry in self._entries.values() if entry.active is not None]

    def all(self) -> list[Entry]:
        """Oldest first. Does not block arrivals or ends."""
        return sorted(self._entries.values(), key=lambda entry: entry.arrived)

    def leave(self, entry: Entry) -> None:
        """Remove an entry and release what it has. Idempotent."""
        with self._lock:
            if self._entries.get(entry.id) is entry:
                del self._entries[entry.id]
        entry.let_go()

    def clear(self) -> list[Entry]:
        """Remove and return the entries of all admitted requests, which the caller must end. Those
        in preparation end by themselves."""
        with self._lock:
            admitted = [entry for entry in self._entries.values() if entry.active is not None]
            for entry in admitted:
                del self._entries[entry.id]
        return admitted


class LoadProgress:
    """What is loaded or measured now, for those who wait for a model. Safe from any thread."""

    def __init__(self) -> None:
        self._stages: dict[Callable[[], LoadingStats], None] = {}

    @contextmanager
    def stage(
        self, model: str, what: str, done: Callable[[], int] = int, total: int = 0, unit: str = ""
    ) -> Iterator[None]:
        """Report a stage of a load in the block: `done()` of `total`. Other threads call `done`."""

        def stats() -> LoadingStats:
            reached = min(max(0, done()), total)
            return LoadingStats(model=model, what=what, done=reached, total=total, unit=unit)

        self._stages[stats] = None
        try:
            yield
        finally:
            del self._stages[stats]

    def stats(self) -> list[LoadingStats]:
        return [stats() for stats in list(self._stages)]


WINDOW = 10.0
"""Seconds of recent steps."""
STATES: dict[Phase, RequestState] = {
    Phase.WAITING: "queued",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
}


def take(entries: Sequence[Entry], models: ModelCache, *, device: str, media: int) -> Stats:
    """The statistics at this moment. `media`: bytes of images that requests hold."""
    now, weights, cache = time.monotonic(), models.queue.models(), models.prefixes.stats()
    instances = [(model, model.started) for model in weights]
    engines = [(model, instance) for model, instance in instances if instance is not None]
    return Stats(
        at=time.time(),
        version=version("mlx-provider"),
        device=device,
        pid=getpid(),
        requests=[summary for entry in entries if (summary := _request(entry, now)) is not None],
        engines=[_engine(model, instance, now) for model, instance in engines],
        loading=models.progress.stats(),
        prefix_cache=cache,
        memory=MemoryStats(
            limit=models.limit,
            active=mx.get_active_memory(),
            pool=mx.get_cache_memory(),
            prefix_cache=cache.bytes,
            media=media,
            models=[_memory(model) for model in weights],
        ),
    )


def _request(entry: Entry, now: float) -> RequestStats | None:
    active = entry.active
    if active is None:
        age = now - entry.arrived
        return RequestStats(id=entry.id, model=entry.model, state="preparing", age=age, queued=age)
    request = active.request
    state = STATES.get(request.phase)
    if state is None:
        return None
    timings = timings_of(request, now)
    return RequestStats(
        id=entry.id,
        model=active.model,
        state=state,
        choices=len(request.rows),
        prompt_tokens=len(request.prompt.tokens),
        cached_tokens=request.cached_tokens,
        prefilled_tokens=request.prefilled_tokens,
        completion_tokens=request.completion_tokens,
        tokens_per_second=timings.tokens_per_second,
        drafted_tokens=request.drafted,
        accepted_tokens=request.accepted,
        age=now - entry.arrived,
        queued=timings.queued,
    )


def _engine(weights: Weights, instance: EngineInstance, now: float) -> EngineStats:
    engine = instance.engine
    steps = [step for step in engine.output.steps.copy() if now - step.ended <= WINDOW]
    began = steps[0].ended - steps[0].seconds if steps else now
    span = max(1.0, now - began)
    return EngineStats(
        model=weights.name,
        kind=weights.key.kind,
        layout=engine.batch.layout.name,
        queued=len(engine.scheduler.queued_jobs) + len(instance.arriving),
        rows=engine.scheduler.active_rows,
        decoded_per_second=sum(step.tokens for step in steps) / span,
        prefilled_per_second=sum(step.chunk for step in steps) / span,
        drafter=instance.drafter,
        drafted_tokens=engine.output.drafted,
        accepted_tokens=engine.output.accepted,
        background_tokens=engine.output.background_tokens,
    )


def _memory(weights: Weights) -> ModelMemory:
    instance = weights.started  # the engine thread may unload it at any time
    return ModelMemory(
        model=weights.name,
        weights=max(weights.loaded_bytes, weights.info.weights_bytes),
        drafters=0 if instance is None else instance.drafter_bytes,
        rows=weights.live_bytes,
        features=weights.features.nbytes,
    )
