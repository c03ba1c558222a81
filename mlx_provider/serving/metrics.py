"""Prometheus metrics of the engine for its operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ..engine.request_log import Recorder
from ..protocol.figures import Figures
from .gauges import Gauges

FIRST_TOKEN_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
"""Seconds. 0.1 s, the stall target, is a limit, so that longer gaps can be counted."""
CHUNK_BUCKETS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens."""
OUTCOMES = ("hit", "new", "cold", "diverged", "no_state")
"""Outcome of a prompt's tokens in the prefix cache (`engine.recent.LookedUp.lost`). `new`: after
the end of the stored path."""


class EngineMetrics(Recorder):
    def __init__(self, figures: Callable[[], Figures | None] = lambda: None) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(Gauges(figures))
        self._received = self._counter("requests_received", "Requests that were queued.")
        self._started = self._counter("requests_started", "Requests whose prefill began.")
        self._finished = self._counter(
            "requests_finished", "Choices that ended, by finish reason.", "reason"
        )
        self._failed = self._counter(
            "requests_failed", "Requests that ended in an error, by its code.", "code"
        )
        self._prefilled = self._counter("prompt_tokens_prefilled", "Prompt tokens computed.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens from the prefix cache.")
        self._decoded = self._counter("tokens_decoded", "Tokens generated.")
        self._skipped = self._counter(
            "tokens_skipped", "Prompt tokens that sparse prefill left out."
        )
        self._ahead = self._counter(
            "prompt_tokens_ahead",
            "Prompt tokens computed while the tools of their session ran, before their request.",
        )
        self._drafted = self._counter("tokens_drafted", "Draft tokens.")
        self._accepted = self._counter("tokens_accepted", "Accepted draft tokens.")
        self._evicted = self._counter("prefix_cache_evictions", "Entries the prefix cache dropped.")
        self._first_token = self._histogram(
            "first_token_seconds", "From acceptance to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_seconds", "Between two tokens of one row.", INTER_TOKEN_BUCKETS
        )
        steps = self._histogram(
            "step_seconds",
            "Steps of an engine: rows that decode, a chunk of a prompt, or both.",
            INTER_TOKEN_BUCKETS,
            "runs",
        )
        self._steps = {runs: steps.labels(runs) for runs in ("decode", "chunk", "mixed")}
        self._chunks = self._histogram("chunk_tokens", "Tokens of a prefill chunk.", CHUNK_BUCKETS)
        looked_up = self._counter(
            "prefix_lookup_tokens",
            "Prompt tokens by outcome of the prefix cache look-up.",
            "outcome",
        )
        self._outcomes = {outcome: looked_up.labels(outcome) for outcome in OUTCOMES}

    def request_queued(self) -> None:
        self._received.inc()

    def request_started(self) -> None:
        self._started.inc()

    def request_finished(self, reason: str) -> None:
        self._finished.labels(reason).inc()

    def request_failed(self, code: str) -> None:
        self._failed.labels(code).inc()

    def tokens(self, prefilled: int, cached: int, decoded: int) -> None:
        self._prefilled.inc(prefilled)
        self._cached.inc(cached)
        self._decoded.inc(decoded)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def evicted(self, n: int) -> None:
        self._evicted.inc(n)

    def skipped(self, tokens: int) -> None:
        self._skipped.inc(tokens)

    def ahead(self, tokens: int) -> None:
        self._ahead.inc(tokens)

    def step(self, seconds: float, chunk: int, *, mixed: bool) -> None:
        self._steps["mixed" if mixed else "chunk" if chunk else "decode"].observe(seconds)
        if chunk:
            self._chunks.observe(chunk)

    def looked_up(self, tokens: Mapping[str, int]) -> None:
        for outcome, count in tokens.items():
            self._outcomes[outcome].inc(count)

    def drafts(self, drafted: int, accepted: int) -> None:
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mlx_provider_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        name = f"mlx_provider_{name}"
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)
