"""What steps report: events for the reader of each request; for the operator counts, recent steps
and one log line per request."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from ..errors import MLXProviderError
from ..protocol.events import Done, Event, Failed, Timings, TokenLogprob, Usage
from ..records import Tokenizer
from ..upstream.detokenizer import token_bytes
from .execution.decode_batch import Logprob
from .prefix_cache.tree import Match
from .request import Request
from .scheduling.step import Chunk, StepPlan

log = logging.getLogger(__name__)
MAX_NAMES, STEPS = 50_000, 512
"""Token texts that are kept for the next logprobs, and steps that are kept for the stats."""
Post = tuple[Request, list[Event]]
"""Events of one step for one request. Its reader waits at `Request.events`."""


class Recorder:
    """Takes counts and values of metrics, and drops them: `serving.metrics.EngineMetrics` keeps
    them, and has the names. Every method is cheap and safe from any thread."""

    def count(self, name: str, n: int = 1, label: str = "") -> None: ...
    def observe(self, name: str, value: float, label: str = "") -> None: ...


def timings_of(request: Request, now: float) -> Timings:
    """Durations in seconds. `now` stands for the time of what has not happened yet."""
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
    """What the log says of a request that ends for `reason`."""
    times = timings_of(request, now)
    new = request.prompt_tokens - request.cached_tokens - request.skipped_tokens
    computed = f"{ran} of {new}" if (ran := request.prefilled_tokens) < new else f"{new}"
    parts = [
        f"queued {times.queued:.3f} s",
        f"prefill {computed} new / {request.cached_tokens} cached tokens",
        "no token" if request.first_token is None else f"first token {times.first_token:.3f} s",
        f"{request.completion_tokens} tokens, {times.tokens_per_second:.1f} tok/s",
    ]
    if request.drafted:
        parts.append(f"{request.accepted} of {request.drafted} drafts accepted")
    summary = [f"request {request.id}: {reason}", ", ".join(parts)]
    return "; ".join([*summary, *filter(None, [request.prefilling, request.explanation])])


class Step(NamedTuple):
    """One step that ran something."""

    ended: float  # in monotonic seconds
    seconds: float
    tokens: int  # tokens of replies that it committed
    chunk: int  # tokens of the prompt chunk. 0: none


class StepOutput:
    """Collects the events of a step, and records what happens. `clock`: monotonic seconds."""

    def __init__(
        self, recorder: Recorder, clock: Callable[[], float], tokenizer: Tokenizer
    ) -> None:
        self.recorder = recorder
        self.clock = clock
        # alternatives repeat from step to step
        self._bytes_of = lru_cache(MAX_NAMES)(partial(token_bytes, tokenizer))
        self._events: dict[Request, list[Event]] = {}
        self.decoded = 0  # tokens committed since the last `add_step`
        # other threads read copies: no thread can interrupt `deque.copy`
        self.steps = deque[Step](maxlen=STEPS)
        self.drafted = self.accepted = 0
        self.background_tokens = 0  # prompt tokens that were computed before their request came

    def post(self, request: Request, events: Sequence[Event]) -> None:
        self._events.setdefault(request, []).extend(events)

    @property
    def empty(self) -> bool:
        return not self._events

    def take(self) -> list[Post]:
        """All events that were posted since the last call."""
        events, self._events = self._events, {}
        return list(events.items())

    def start(self, request: Request) -> None:
        """A request was admitted: for the first time, or again."""
        if request.started is None and not request.background:
            request.started = self.clock()
            self.recorder.count("requests_started")

    def describe(self, token: int, logprob: Logprob) -> TokenLogprob:
        """The log-probabilities of a token and its alternatives, with their texts."""
        top = [self._describe(other, value, []) for other, value in logprob.top]
        return self._describe(token, logprob.drawn, top)

    def _describe(self, token: int, logprob: float | None, top: list[TokenLogprob]) -> TokenLogprob:
        data = self._bytes_of(token)
        text = data.decode(errors="replace")
        return TokenLogprob(token=text, id=token, logprob=logprob, bytes=list(data), top=top)

    def add_token(self, request: Request, now: float) -> None:
        if request.first_token is None:
            request.first_token = now
            self.recorder.observe("first_token_seconds", now - request.arrived)
        elif request.last_token is not None:
            self.recorder.observe("inter_token_seconds", now - request.last_token)
        request.last_token = now
        self.decoded += 1

    def add_drafts(self, drafts: int, accepted: int) -> None:
        self.recorder.count("tokens_drafted", drafts)
        self.recorder.count("tokens_accepted", accepted)
        self.drafted += drafts
        self.accepted += accepted

    def add_chunk(self, chunk: Chunk) -> None:
        chunk.job.request.prefilled_tokens += chunk.size
        self.recorder.count("prompt_tokens_prefilled", chunk.size)
        if chunk.job.request.background:
            self.background_tokens += chunk.size
            self.recorder.count("background_prompt_tokens", chunk.size)

    def add_lookup(self, found: Match) -> None:
        """Count the prompt's tokens by the reason why they are computed or reused."""
        rest = "new" if found.diverged_at is None else "diverged"
        tokens = {
            "hit": found.length,
            "no_state": found.shared - found.length,
            rest if found.shared else "cold": found.total - found.shared,
        }
        for outcome, count in tokens.items():
            self.recorder.count("prefix_lookup_tokens", count, outcome)

    def add_step(self, plan: StepPlan, began: float) -> None:
        ended = self.clock()
        seconds, chunk = ended - began, 0 if plan.chunk is None else plan.chunk.size
        self.steps.append(Step(ended, seconds, self.decoded, chunk))
        self.recorder.count("tokens_decoded", self.decoded)
        self.decoded = 0
        kind = "mixed" if plan.mixed else "chunk" if chunk else "decode"
        self.recorder.observe("step_seconds", seconds, kind)
        if chunk:
            self.recorder.observe("chunk_tokens", chunk)

    def end(self, request: Request, reason: str) -> None:
        """Post and log that a request ends, without an error."""
        now = self.clock()
        usage = Usage(
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            stored_tokens=request.stored_tokens,
            completion_tokens=request.completion_tokens,
            reasoning_tokens=request.reasoning_tokens,
            skipped_tokens=request.skipped_tokens,
            drafted_tokens=request.drafted,
            accepted_tokens=request.accepted,
        )
        self.post(request, [Done(usage=usage, timings=timings_of(request, now))])
        self.recorder.count("requests_finished", label=reason)
        log.info(log_line(request, reason, now))

    def fail(self, request: Request, error: MLXProviderError) -> None:
        """Post and log that a request ends with an error."""
        self.post(request, [Failed.of(error)])
        self.recorder.count("requests_failed", label=error.code)
        log.warning("request %s failed: %s", request.id, error.message)
