"""Statistics of the engine as Prometheus gauges, computed at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..protocol.figures import Figures, MemoryFigures

Sample = tuple[tuple[str, ...], float]


class Gauges(Collector):
    """Keeps no state between scrapes, so a removed object disappears from the next one."""

    def __init__(self, figures: Callable[[], Figures | None]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        """Empty, because registration must not collect statistics."""
        return []

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        if figures is None:
            return
        labels = ("version", "device")
        shown = (figures.version, figures.device)
        yield _gauge("engine_info", "The engine process; always 1.", labels, [(shown, 1)])
        yield _gauge("requests", "Requests in flight.", ("model", "state"), _requests(figures))
        for name, text, number in _numbers(figures):
            yield _gauge(name, text, (), [((), number)])
        yield from _of_drafters(figures)
        yield from _of_memory(figures.memory)


def _numbers(figures: Figures) -> Iterator[tuple[str, str, float]]:
    engines, memory, cache = figures.engines, figures.memory, figures.prefix_cache
    yield "requests_queued", "Requests that wait now.", sum(each.queued for each in engines)
    yield "requests_running", "Requests that run now.", sum(each.rows for each in engines)
    yield "models_loaded", "Models in memory.", len(memory.models)
    yield "active_memory_bytes", "Device memory in use.", memory.active
    yield "memory_limit_bytes", "Memory limit of the engine.", memory.limit
    yield "prefix_cache_bytes", "Memory that the prefix cache holds.", cache.bytes
    yield "prefix_cache_budget_bytes", "Present limit of the prefix cache.", cache.budget
    yield "prefix_cache_disk_bytes", "Files of the prefix cache on disk.", cache.disk_bytes
    yield "prefix_cache_entries", "Stored paths.", cache.entries


def _requests(figures: Figures) -> list[Sample]:
    # the name of a model that is not loaded yet is the client's free text
    named = {each.model for each in figures.engines}
    counted = Counter(
        (each.model if each.model in named else "", each.state) for each in figures.requests
    )
    for model in named:
        for state in ("queued", "prefill", "decode"):
            counted[model, state] += 0
    return list(counted.items())


def _of_drafters(figures: Figures) -> Iterator[Metric]:
    drafted: Counter[tuple[str, ...]] = Counter()
    held: Counter[tuple[str, ...]] = Counter()
    for each in figures.engines:
        if each.drafter:
            drafted[each.model, each.drafter] += each.drafted_tokens
            held[each.model, each.drafter] += each.accepted_tokens
    names = ("model", "drafter")
    about = "since the model was loaded."
    yield _gauge("drafter_tokens_drafted", f"Draft tokens {about}", names, drafted.items())
    yield _gauge("drafter_tokens_accepted", f"Accepted draft tokens {about}", names, held.items())


def _of_memory(memory: MemoryFigures) -> Iterator[Metric]:
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
