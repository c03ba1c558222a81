"""The figures of the engine in Prometheus' words, made when somebody scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..protocol.figures import Figures

Sample = tuple[tuple[str, ...], float]


class Gauges(Collector):
    """What is gone is in no scrape: nothing is kept between two."""

    def __init__(self, figures: Callable[[], Figures | None]) -> None:
        """`figures`: those of now; `None`: there are none to be had."""
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering asks nobody for figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every gauge."""
        figures = self._figures()
        if figures is None:
            return
        yield _gauge(
            "engine_info", "The engine process; always 1.", ("version", "device"),
            [((figures.version, figures.device), 1)],
        )  # fmt: skip
        yield _gauge("requests", "Requests in flight.", ("model", "state"), _requests(figures))
        yield from _of_models(figures)
        yield from _of_memory(figures)
        yield from _of_cache(figures)


def _requests(figures: Figures) -> list[Sample]:
    # a model that is not here yet may have any name that a client chose
    named = {each.model for each in figures.engines}
    counted = Counter(
        (each.model if each.model in named else "", each.state) for each in figures.requests
    )
    for model in named:
        for state in ("queued", "prefill", "decode"):
            counted[model, state] += 0
    return list(counted.items())


def _of_models(figures: Figures) -> Iterator[Metric]:
    counted = Counter(each.model for each in figures.memory.models)
    yield _gauge("models_loaded", "Models in memory.", (), [((), counted.total())])
    drafted: Counter[tuple[str, ...]] = Counter()
    held: Counter[tuple[str, ...]] = Counter()
    for each in figures.engines:
        if each.drafter:
            drafted[each.model, each.drafter] += each.drafted_tokens
            held[each.model, each.drafter] += each.accepted_tokens
    names = ("model", "drafter")
    about = "since the model was loaded."
    yield _gauge("drafter_tokens_drafted", f"Tokens guessed, {about}", names, drafted.items())
    yield _gauge("drafter_tokens_accepted", f"Guesses that held, {about}", names, held.items())


def _of_memory(figures: Figures) -> Iterator[Metric]:
    memory, of_models = figures.memory, figures.memory.models
    owners = {
        "weights": sum(each.weights for each in of_models),
        "drafters": sum(each.drafters for each in of_models),
        "rows": sum(each.rows for each in of_models),
        "features": sum(each.features for each in of_models),
        "prefix_cache": memory.prefix_cache,
        "media": memory.media,
        "pool": memory.pool,
    }
    yield _gauge(
        "memory_bytes", "Memory by owner; of rows and images, what is set aside for them.",
        ("owner",), [((owner,), nbytes) for owner, nbytes in owners.items()],
    )  # fmt: skip
    yield _gauge("memory_limit_bytes", "What all of it may take.", (), [((), memory.limit)])
    taken: Counter[tuple[str, ...]] = Counter()
    for each in of_models:
        taken[each.model, "weights"] += each.weights
        taken[each.model, "drafters"] += each.drafters
        taken[each.model, "rows"] += each.rows
        taken[each.model, "features"] += each.features
    names = ("model", "owner")
    yield _gauge("model_memory_bytes", "Memory of each model.", names, taken.items())


def _of_cache(figures: Figures) -> Iterator[Metric]:
    cache = figures.prefix_cache
    yield _gauge("prefix_cache_entries", "Stored paths.", (), [((), cache.entries)])
    yield _gauge(
        "prefix_cache_budget_bytes", "What the prefix cache may hold now.", (),
        [((), cache.budget)],
    )  # fmt: skip


def _gauge(
    name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"mlx_provider_{name}", text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family
