"""What the engine counts for its operator, in Prometheus' words."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_TOKEN_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
"""Seconds. The stall target of 0.1 s is a border, so that crossing it can be counted."""


class EngineMetrics:
    """One registry per engine, no globals. Every method is cheap and safe from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._received = self._counter("requests_received", "Requests that were queued.")
        self._started = self._counter("requests_started", "Requests whose prefill began.")
        self._finished = Counter(
            "mlx_provider_requests_finished",
            "Choices that ended, by finish reason.",
            ["reason"],
            registry=self._registry,
        )
        self._failed = Counter(
            "mlx_provider_requests_failed",
            "Requests that ended in an error, by its code.",
            ["code"],
            registry=self._registry,
        )
        self._prefilled = self._counter("prompt_tokens_prefilled", "Prompt tokens computed.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens from the prefix cache.")
        self._decoded = self._counter("tokens_decoded", "Tokens generated.")
        self._skipped = self._counter(
            "tokens_skipped", "Prompt tokens that were left out as of little importance."
        )
        self._drafted = self._counter("tokens_drafted", "Tokens that were guessed ahead.")
        self._accepted = self._counter("tokens_accepted", "Guessed tokens that held.")
        self._evicted = self._counter("prefix_cache_evictions", "Entries the prefix cache dropped.")
        self._first_token = self._histogram(
            "first_token_seconds", "From acceptance to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_seconds", "Between two tokens of one row.", INTER_TOKEN_BUCKETS
        )
        self._queued_now = self._gauge("requests_queued", "Requests that wait now.")
        self._running_now = self._gauge("requests_running", "Requests that run now.")
        self._memory = self._gauge("active_memory_bytes", "Device memory in use.")
        self._store = self._gauge("prefix_cache_bytes", "Memory that the prefix cache holds.")

    def request_queued(self) -> None:
        """A request was accepted."""
        self._received.inc()

    def request_started(self) -> None:
        """A request left the queue."""
        self._started.inc()

    def request_finished(self, reason: str) -> None:
        """A choice ended with this finish reason."""
        self._finished.labels(reason).inc()

    def request_failed(self, code: str) -> None:
        """A request ended in the error with this code."""
        self._failed.labels(code).inc()

    def tokens(self, prefilled: int, cached: int, decoded: int) -> None:
        """Add the tokens of one step."""
        self._prefilled.inc(prefilled)
        self._cached.inc(cached)
        self._decoded.inc(decoded)

    def first_token(self, seconds: float) -> None:
        """A request's first token came this long after its acceptance."""
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        """A row's token came this long after the one before."""
        self._inter_token.observe(seconds)

    def set_state(
        self, queued: int, running: int, active_memory: int, prefix_cache_bytes: int
    ) -> None:
        """State after a step; memory in bytes."""
        self._queued_now.set(queued)
        self._running_now.set(running)
        self._memory.set(active_memory)
        self._store.set(prefix_cache_bytes)

    def evicted(self, n: int) -> None:
        """The prefix cache dropped `n` entries."""
        self._evicted.inc(n)

    def skipped(self, tokens: int) -> None:
        """So many tokens of a prompt will not be computed."""
        self._skipped.inc(tokens)

    def drafts(self, drafted: int, accepted: int) -> None:
        """So many tokens were guessed ahead, and so many of them held."""
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"mlx_provider_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"mlx_provider_{name}", text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mlx_provider_{name}", text, buckets=buckets, registry=self._registry)
