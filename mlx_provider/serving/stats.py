"""The requests in flight, and live statistics of the engine, collected in the caller's thread. Only
the prefix tree comes from the engine thread, between two steps."""

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
    id: str
    queue: EventQueue
    media: MediaClaim
    model: str
    arrived: float
    """Monotonic seconds."""
    active: Active | None = None
    """`None` during its preparation."""
    turn: ToolTurn | None = None
    """Set if the reply may end with calls."""

    def check_wanted(self) -> None:
        """Raises `RequestFailed` if nothing waits for its events."""
        if self.queue.ended:
            raise RequestFailed.cancellation()

    def let_go(self) -> None:
        """Release its image memory and its model. Idempotent."""
        self.media.close()
        if self.active is not None:
            self.active.lease.release()


class InFlight:
    """Safe from any thread. One lock for all entries and requests that reach no engine yet."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def arrive(self, entry: Entry) -> None:
        """Raises `BadRequest` if its id is in use, because clients cancel by id."""
        with self._lock:
            if self._entries.setdefault(entry.id, entry) is not entry:
                raise BadRequest("another request with this id is being served", param="id")

    def enter(self, entry: Entry, request: Request, view: ModelView, lease: Lease) -> Active:
        """Admit a request. Raises the errors of the scheduler's `check`, and `RequestFailed` if
        nothing waits for it."""
        instance = view.weights.instance
        with self._lock:
            entry.check_wanted()
            instance.engine.scheduler.check(request, instance.arriving)
            instance.arriving.append(request.tenant)
            entry.active = Active(request, view.weights.name, lease, instance)
            return entry.active

    def reach_engine(self, active: Active) -> None:
        with self._lock:
            active.instance.arriving.remove(active.request.tenant)

    def cancel(self, name: str) -> Entry | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.active is None:
                entry.queue.put([Failed.of(RequestFailed.cancellation())])
            return entry

    def of(self, request: Request) -> tuple[Entry, Active] | None:
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
        with self._lock:
            if self._entries.get(entry.id) is entry:
                del self._entries[entry.id]
        entry.let_go()

    def clear(self) -> list[Entry]:
        """Remove all admitted requests, which the caller must end. Those in preparation end by
        themselves."""
        with self._lock:
            gone = [entry for entry in self._entries.values() if entry.active is not None]
            for entry in gone:
                del self._entries[entry.id]
        return gone


class LoadProgress:
    """What is loaded or measured now, for those who wait for a model. Safe from any thread."""

    def __init__(self) -> None:
        self._stages: dict[Callable[[], LoadingStats], None] = {}

    @contextmanager
    def stage(
        self, model: str, what: str, done: Callable[[], int] = int, total: int = 0, unit: str = ""
    ) -> Iterator[None]:
        """Report a stage during the block. `done` is called by other threads."""

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
    """`media`: bytes of images held by requests."""
    now, weights, cache = time.monotonic(), models.queue.models(), models.prefixes.stats()
    running = [(model, model.started) for model in weights]
    engines = [(model, run) for model, run in running if run is not None]
    return Stats(
        at=time.time(),
        version=version("mlx-provider"),
        device=device,
        pid=getpid(),
        requests=[summary for entry in entries if (summary := _request(entry, now)) is not None],
        engines=[_engine(model, run, now) for model, run in engines],
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
    span = max(1.0, now - steps[0].ended + steps[0].seconds) if steps else 1.0
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
