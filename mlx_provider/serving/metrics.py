"""Prometheus metrics of the engine for its operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.step_output import Recorder
from ..protocol.health import MemoryStats, Stats

NAME = "mlx_provider"
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
    family = GaugeMetricFamily(f"{NAME}_{name}", text, labels=labels)
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


COUNTERS: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "requests_received": ("Requests that were queued.", (), ()),
    "requests_started": ("Requests whose prefill began.", (), ()),
    "requests_finished": ("Choices that ended, by finish reason.", ("reason",), ()),
    "requests_failed": ("Requests that ended in an error, by its code.", ("code",), ()),
    "prompt_tokens_prefilled": ("Prompt tokens computed.", (), ()),
    "prompt_tokens_cached": ("Prompt tokens from the prefix cache.", (), ()),
    "prompt_tokens_ahead": (
        "Prompt tokens computed while the tools of their session ran, before their request.",
        (),
        (),
    ),
    "tokens_decoded": ("Tokens generated.", (), ()),
    "tokens_skipped": ("Prompt tokens that sparse prefill left out.", (), ()),
    "tokens_drafted": ("Draft tokens.", (), ()),
    "tokens_accepted": ("Accepted draft tokens.", (), ()),
    "prefix_cache_evictions": ("Entries the prefix cache dropped.", (), ()),
    "prefix_lookup_tokens": (
        "Prompt tokens by outcome of the prefix cache look-up.",
        ("outcome",),
        OUTCOMES,
    ),
}
"""(help, name of the label, its values that are always shown)."""
HISTOGRAMS: Mapping[str, tuple[str, Sequence[str], Sequence[str], Sequence[float]]] = {
    "first_token_seconds": ("From acceptance to the first token.", (), (), FIRST_TOKEN_BUCKETS),
    "inter_token_seconds": ("Between two tokens of one row.", (), (), INTER_TOKEN_BUCKETS),
    "step_seconds": (
        "Steps of an engine: rows that decode, a chunk of a prompt, or both.",
        ("runs",),
        ("decode", "chunk", "mixed"),
        INTER_TOKEN_BUCKETS,
    ),
    "chunk_tokens": ("Tokens of a prefill chunk.", (), (), CHUNK_BUCKETS),
}


class EngineMetrics(Recorder):
    def __init__(self, stats: Callable[[], Stats | None] = lambda: None) -> None:
        self._registry = registry = CollectorRegistry(auto_describe=True)
        registry.register(Gauges(stats))
        self._counters = {
            name: PrometheusCounter(name, text, labels, namespace=NAME, registry=registry)
            for name, (text, labels, _) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, labels, NAME, buckets=buckets, registry=registry)
            for name, (text, labels, _, buckets) in HISTOGRAMS.items()
        }
        for name, (_, _, values) in COUNTERS.items():
            for value in values:
                self._counters[name].labels(value)
        for name, (_, _, values, _) in HISTOGRAMS.items():
            for value in values:
                self._histograms[name].labels(value)

    def count(self, name: str, n: int = 1, label: str = "") -> None:
        counter = self._counters[name]
        (counter.labels(label) if label else counter).inc(n)

    def observe(self, name: str, value: float, label: str = "") -> None:
        histogram = self._histograms[name]
        (histogram.labels(label) if label else histogram).observe(value)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
