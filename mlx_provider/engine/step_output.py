"""Output of a step for readers and for the operator: events, logprobs, counts, recent steps, one
log line per request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from ..errors import MLXProviderError
from ..protocol.events import Done, Event, Failed, Timings, TokenLogprob, Usage
from ..records import Tokenizer
from .detokenizer import token_bytes
from .execution.decode_batch import Logprob
from .request import Request

log = logging.getLogger(__name__)
MAX_NAMES = 50_000
"""Alternatives repeat from step to step."""
Post = tuple[Request, list[Event]]
"""Events of one step for one request. Its reader waits at `Request.events`."""
STEPS = 512
LOOKUPS = 32
T = TypeVar("T", bound=NamedTuple)


class Recorder:
    """Counts and times of requests. Every method is cheap and safe from any thread. It keeps
    nothing; see `serving.metrics.EngineMetrics`."""

    def request_queued(self) -> None: ...
    def request_started(self) -> None: ...
    def request_finished(self, reason: str) -> None: ...
    def request_failed(self, code: str) -> None: ...
    def tokens(self, prefilled: int, cached: int, decoded: int) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def inter_token(self, seconds: float) -> None: ...
    def drafts(self, drafted: int, accepted: int) -> None: ...
    def skipped(self, tokens: int) -> None: ...
    def ahead(self, tokens: int) -> None: ...
    def evicted(self, n: int) -> None: ...
    def step(self, seconds: float, chunk: int, *, mixed: bool) -> None: ...
    def looked_up(self, tokens: Mapping[str, int]) -> None: ...


def timings_of(request: Request, now: float) -> Timings:
    started = now if request.started is None else request.started
    first = now if request.first_token is None else request.first_token
    last = first if request.last_token is None else request.last_token
    after_first = request.completion_tokens - len(request.rows)
    rate = after_first / (last - first) if last > first and after_first > 0 else 0.0
    return Timings(
        queued=started - request.arrived,
        prefill=max(0.0, first - started),
        first_token=first - request.arrived,
        total=now - request.arrived,
        tokens_per_second=rate,
    )


def log_line(request: Request, reason: str, now: float) -> str:
    times = timings_of(request, now)
    new = request.prompt_tokens - request.cached - request.skipped
    computed = f"{request.prefilled} of {new}" if request.prefilled < new else f"{new}"
    parts = [
        f"queued {times.queued:.3f} s",
        f"prefill {computed} new / {request.cached} cached tokens",
        "no token" if request.first_token is None else f"first token {times.first_token:.3f} s",
        f"{request.completion_tokens} tokens, {times.tokens_per_second:.1f} tok/s",
    ]
    if request.drafted:
        parts.append(f"{request.accepted} of {request.drafted} drafts held")
    summary = [f"request {request.id}: {reason}", ", ".join(parts)]
    return "; ".join([*summary, *filter(None, [request.prefilling, request.explanation])])


class TokenNames:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def describe(self, token: int, logprob: Logprob) -> TokenLogprob:
        top = [self._describe(other, value) for other, value in logprob.top]
        return self._describe(token, logprob.drawn, top)

    def first_token(self, token: int) -> TokenLogprob:
        """The first token of a prompt, which has no logprob."""
        return self._describe(token, None)

    def _describe(
        self, token: int, logprob: float | None, top: list[TokenLogprob] | None = None
    ) -> TokenLogprob:
        data = self._bytes.get(token)
        if data is None:
            if len(self._bytes) >= MAX_NAMES:
                self._bytes.clear()
            data = self._bytes[token] = token_bytes(self._tokenizer, token)
        return TokenLogprob(
            token=data.decode(errors="replace"),
            id=token,
            logprob=logprob,
            bytes=list(data),
            top=top or [],
        )


class StepOutput:
    def __init__(self, recorder: Recorder, clock: Callable[[], float]) -> None:
        self.recorder = recorder
        self.clock = clock
        self._events: dict[Request, list[Event]] = {}
        self.decoded = 0
        """Tokens committed since the last `take`."""

    def post(self, request: Request, events: Sequence[Event]) -> None:
        self._events.setdefault(request, []).extend(events)

    @property
    def empty(self) -> bool:
        return not self._events

    def take(self) -> list[Post]:
        if self.decoded:
            self.recorder.tokens(prefilled=0, cached=0, decoded=self.decoded)
            self.decoded = 0
        events, self._events = self._events, {}
        return list(events.items())

    def start(self, request: Request) -> None:
        if request.started is None and not request.ahead:
            request.started = self.clock()
            self.recorder.request_started()

    def add_token(self, request: Request, now: float) -> None:
        if request.first_token is None:
            request.first_token = now
            self.recorder.first_token(now - request.arrived)
        elif request.last_token is not None:
            self.recorder.inter_token(now - request.last_token)
        request.last_token = now
        self.decoded += 1

    def end(self, request: Request, reason: str) -> None:
        now = self.clock()
        usage = Usage(
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached,
            stored_tokens=request.stored,
            completion_tokens=request.completion_tokens,
            reasoning_tokens=request.reasoning_tokens,
            skipped_tokens=request.skipped,
            drafted_tokens=request.drafted,
            accepted_tokens=request.accepted,
        )
        self.post(request, [Done(usage=usage, timings=timings_of(request, now))])
        self.recorder.request_finished(reason)
        log.info(log_line(request, reason, now))

    def fail(self, request: Request, error: MLXProviderError) -> None:
        self.post(request, [Failed.of(error)])
        self.recorder.request_failed(error.code)
        log.warning("request %s failed: %s", request.id, error.message)


# -- statistics


class Step(NamedTuple):
    """One step that ran something. Times are monotonic seconds."""

    ended: float
    seconds: float
    rows: int
    tokens: int
    chunk: int
    mixed: bool


class LookedUp(NamedTuple):
    at: float
    request: str
    asked: int
    shared: int
    reused: int
    diverged: bool

    @property
    def lost(self) -> dict[str, int]:
        """The prompt's tokens by the reason why they were computed or reused."""
        rest = "cold" if not self.shared else "diverged" if self.diverged else "new"
        return {
            "hit": self.reused,
            "no_state": self.shared - self.reused,
            rest: self.asked - self.shared,
        }


class Ring(Generic[T]):
    """One thread adds; any thread may read, without a lock."""

    def __init__(self, size: int) -> None:
        self._kept: list[T | None] = [None] * size
        self._added = 0

    def add(self, item: T) -> None:
        self._kept[self._added % len(self._kept)] = item
        self._added += 1

    def items(self) -> list[T]:
        """Sorted by their first field, which is a time."""
        # a slice is one operation that no thread can interrupt
        return sorted(item for item in self._kept[:] if item is not None)


class Recent:
    """Recent steps and look-ups of an engine, for statistics."""

    def __init__(self) -> None:
        self.steps: Ring[Step] = Ring(STEPS)
        self.lookups: Ring[LookedUp] = Ring(LOOKUPS)
        self.drafted = 0
        self.accepted = 0
        self.ahead = 0
        """Prompt tokens that were computed before their request came."""
