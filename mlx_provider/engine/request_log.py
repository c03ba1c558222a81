"""Reports about a request to the operator: metrics, timings, a log line."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.events import Timings
from .request import Request


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
