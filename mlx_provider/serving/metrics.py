"""Prometheus metrics of the engine for its operator."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.step_output import Recorder
from ..protocol.health import Stats

NAME = "mlx_provider"


class Gauges(Collector):
    """Gauges of `Stats`. Keeps no state between scrapes: what is gone disappears from the next."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Empty, because registration must not collect statistics."""
        return []

    def collect(self) -> Iterator[Metric]:
        if (stats := self._stats()) is None:
            return
        for name, text, labels, samples in _gauges(stats):
            family = GaugeMetricFamily(f"{NAME}_{name}", text, labels=labels)
            for values, number in samples:
                family.add_metric(values, number)
            yield family


Gauge = tuple[str, str, tuple[str, ...], Iterable[tuple[tuple[str, ...], float]]]
"""Name, help, names of labels, samples."""


def _gauges(stats: Stats) -> Iterator[Gauge]:
    memory = stats.memory
    drafted: Counter[tuple[str, ...]] = Counter()
    accepted: Counter[tuple[str, ...]] = Counter()
    for engine in stats.engines:
        if engine.drafter:
            drafted[engine.model, engine.drafter] += engine.drafted_tokens
            accepted[engine.model, engine.drafter] += engine.accepted_tokens
    owned: Counter[tuple[str, ...]] = Counter()
    for model in memory.models:
        for owner, nbytes in model.owners().items():
            owned[model.model, owner] += nbytes
    info = [((stats.version, stats.device), 1)]
    yield "engine_info", "The engine process; always 1.", ("version", "device"), info
    yield "requests", "Requests in flight.", ("model", "state"), _requests(stats)
    for name, text, number in _numbers(stats):
        yield name, text, (), [((), number)]
    names = ("model", "drafter")
    since = "since the model was loaded."
    yield "drafter_tokens_drafted", f"Draft tokens {since}", names, drafted.items()
    yield "drafter_tokens_accepted", f"Accepted draft tokens {since}", names, accepted.items()
    owners = [((owner,), nbytes) for owner, nbytes in memory.owners().items()]
    text = "Memory by owner; for rows and images the reserved memory."
    yield "memory_bytes", text, ("owner",), owners
    yield "model_memory_bytes", "Memory of each model.", ("model", "owner"), owned.items()


def _numbers(stats: Stats) -> Iterator[tuple[str, str, float]]:
    engines, memory, cache = stats.engines, stats.memory, stats.prefix_cache
    yield "requests_queued", "Requests that wait now.", sum(engine.queued for engine in engines)
    yield "requests_running", "Rows that run now.", sum(engine.rows for engine in engines)
    yield "models_loaded", "Models in memory.", len(memory.models)
    yield "active_memory_bytes", "Device memory in use.", memory.active
    yield "memory_limit_bytes", "Memory limit of the engine.", memory.limit
    yield "prefix_cache_bytes", "Memory that the prefix cache holds.", cache.bytes
    yield "prefix_cache_budget_bytes", "Present limit of the prefix cache.", cache.budget
    yield "prefix_cache_disk_bytes", "Files of the prefix cache on disk.", cache.disk_bytes
    yield "prefix_cache_entries", "Stored prefixes.", cache.entries


def _requests(stats: Stats) -> Iterable[tuple[tuple[str, str], int]]:
    # the name of a model that is not loaded yet is the client's free text
    named = {engine.model for engine in stats.engines}
    counted = Counter({(m, state): 0 for m in named for state in ("queued", "prefill", "decode")})
    for request in stats.requests:
        counted[request.model if request.model in named else "", request.state] += 1
    return counted.items()


FIRST_TOKEN_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
"""Seconds. 0.1 s, the ITL target, is a limit, so that longer gaps can be counted."""
CHUNK_BUCKETS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens."""
OUTCOMES = ("hit", "new", "cold", "diverged", "no_state")
"""Outcome of a prompt's tokens in the prefix cache. `new`: after the end of the stored path;
`cold`: nothing stored begins like the prompt; `diverged`: it differs from what is stored;
`no_state`: more was computed, but a pass cannot continue from there."""

BACKGROUND = "Prompt tokens computed while the tools of their session ran, before their request."
STEPS = "Steps of an engine: rows that decode, a chunk of a prompt, or both."
COUNTERS: Mapping[str, str] = {
    "requests_received": "Requests that were queued.",
    "requests_started": "Requests whose prefill began.",
    "requests_finished": "Choices that ended, by finish reason.",
    "requests_failed": "Requests that ended in an error, by its code.",
    "prompt_tokens_prefilled": "Prompt tokens computed.",
    "prompt_tokens_cached": "Prompt tokens from the prefix cache.",
    "background_prompt_tokens": BACKGROUND,
    "tokens_decoded": "Tokens generated.",
    "tokens_skipped": "Prompt tokens that sparse prefill left out.",
    "tokens_drafted": "Draft tokens.",
    "tokens_accepted": "Accepted draft tokens.",
    "prefix_cache_evictions": "Times that prefixes were evicted for weights or rows.",
    "prefix_lookup_tokens": "Prompt tokens by outcome of the prefix cache look-up.",
}
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "first_token_seconds": ("From acceptance to the first token.", FIRST_TOKEN_BUCKETS),
    "inter_token_seconds": ("Between two tokens of one row.", INTER_TOKEN_BUCKETS),
    "step_seconds": (STEPS, INTER_TOKEN_BUCKETS),
    "chunk_tokens": ("Tokens of a prefill chunk.", CHUNK_BUCKETS),
}
LABELS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "requests_finished": (["reason"], ()),
    "requests_failed": (["code"], ()),
    "prefix_lookup_tokens": (["outcome"], OUTCOMES),
    "step_seconds": (["runs"], ("decode", "chunk", "mixed")),
}
"""The label of a metric that has one, and those of its values that are always shown."""


class EngineMetrics(Recorder):
    def __init__(self, stats: Callable[[], Stats | None] = lambda: None) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(Gauges(stats))
        self._metrics: dict[tuple[str, str], Any] = {}
        for name, text in COUNTERS.items():
            self._add(name, PrometheusCounter, text)
        for name, (text, buckets) in HISTOGRAMS.items():
            self._add(name, partial(Histogram, buckets=buckets), text)

    def _add(self, name: str, make: Callable[..., Any], text: str) -> None:
        labels, values = LABELS.get(name, ((), ()))
        metric = self._metrics[name, ""] = make(name, text, labels, NAME, registry=self._registry)
        for value in values:
            self._metrics[name, value] = metric.labels(value)

    def _of(self, name: str, label: str) -> Any:
        return self._metrics.get((name, label)) or self._metrics[name, ""].labels(label)

    def count(self, name: str, n: int = 1, label: str = "") -> None:
        self._of(name, label).inc(n)

    def observe(self, name: str, value: float, label: str = "") -> None:
        self._of(name, label).observe(value)

    def exposition(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
