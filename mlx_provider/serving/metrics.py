"""Prometheus metrics of the engine for its operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.step_output import Recorder
from ..protocol.health import MemoryStats, Stats

Sample = tuple[tuple[str, ...], float]


class Gauges(Collector):
    """Keeps no state between scrapes, so a removed object disappears from the next one."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Empty, because registration must not collect statistics."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        sample = (stats.version, stats.device), 1
        yield _gauge(
            "engine_info", "The engine process; always 1.", ("version", "device"), [sample]
        )
        yield _gauge("requests", "Requests in flight.", ("model", "state"), _requests(stats))
        for name, text, number in _numbers(stats):
            yield _gauge(name, text, (), [((), number)])
        yield from _of_drafters(stats)
        yield from _of_memory(stats.memory)


def _numbers(stats: Stats) -> Iterator[tuple[str, str, float]]:
    engines, memory, cache = stats.engines, stats.memory, stats.prefix_cache
    yield "requests_queued", "Requests that wait now.", sum(each.queued for each in engines)
    yield "requests_running", "Requests that run now.", sum(each.rows for each in engines)
    yield "models_loaded", "Models in memory.", len(memory.models)
    yield "active_memory_bytes", "Device memory in use.", memory.active
    yield "memory_limit_bytes", "Memory limit of the engine.", memory.limit
    yield "prefix_cache_bytes", "Memory that the prefix cache holds.", cache.bytes
    yield "prefix_cache_budget_bytes", "Present limit of the prefix cache.", cache.budget
    yield "prefix_cache_disk_bytes", "Files of the prefix cache on disk.", cache.disk_bytes
    yield "prefix_cache_entries", "Stored paths.", cache.entries


def _requests(stats: Stats) -> list[Sample]:
    # the name of a model that is not loaded yet is the client's free text
    named = {each.model for each in stats.engines}
    counted = Counter(
        (each.model if each.model in named else "", each.state) for each in stats.requests
    )
    for model in named:
        for state in ("queued", "prefill", "decode"):
            counted[model, state] += 0
    return list(counted.items())


def _of_drafters(stats: Stats) -> Iterator[Metric]:
    drafted: Counter[tuple[str, ...]] = Counter()
    accepted: Counter[tuple[str, ...]] = Counter()
    for each in stats.engines:
        if each.drafter:
            drafted[each.model, each.drafter] += each.drafted_tokens
            accepted[each.model, each.drafter] += each.accepted_tokens
    names = ("model", "drafter")
    about = "since the model was loaded."
    yield _gauge("drafter_tokens_drafted", f"Draft tokens {about}", names, drafted.items())
    yield _gauge(
        "drafter_tokens_accepted", f"Accepted draft tokens {about}", names, accepted.items()
    )


def _of_memory(memory: MemoryStats) -> Iterator[Metric]:
    text = "Memory by owner; for rows and images the reserved memory."
    owners = [((owner,), nbytes) for owner, nbytes in memory.owners().items()]
    yield _gauge("memory_bytes", text, ("owner",), owners)
    taken: Counter[tuple[str, ...]] = Counter()
    for each in memory.models:
        for owner, nbytes in each.owners().items():
            taken[each.model, owner] += nbytes
    names = ("model", "owner")
    yield _gauge("model_memory_bytes", "Memory of each model.", names, taken.items())


def _gauge(
    name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"mlx_provider_{name}", text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


FIRST_TOKEN_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
"""Seconds. 0.1 s, the stall target, is a limit, so that longer gaps can be counted."""
CHUNK_BUCKETS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens."""
OUTCOMES = ("hit", "new", "cold", "diverged", "no_state")
"""Outcome of a prompt's tokens in the prefix cache (`LookedUp.lost`). `new`: after the end of the
stored path."""


class EngineMetrics(Recorder):
    def __init__(self, stats: Callable[[], Stats | None] = lambda: None) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(Gauges(stats))
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

    def _counter(self, name: str, text: str, *labels: str) -> PrometheusCounter:
        return PrometheusCounter(f"mlx_provider_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        name = f"mlx_provider_{name}"
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)
