"""Vision requests through the engine: beside each other, cancelled, repeated, cached."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from greedy import greedy
from integrity import check_integrity
from mlx_provider import LoadedModel, LoadOptions, Prompt
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.serving.probe import probe
from mlx_provider.testing.driver import Alternating, new_engine, new_request, output_of, run
from mlx_provider_vision.loading import load_any
from noted_calls import note_calls
from schedules import run_arrivals
from tiny.models import tiny_image

ALL = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3"]
GENERIC = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3"]
TEXT = "The quick brown fox asks the lazy dog what the weather is like in Paris today. "
COUNT = 6


class Arrival(NamedTuple):
    step: int
    parts: tuple[Any, ...]
    cancel_after: int | None = None


SCHEDULE = (
    Arrival(0, ("Hello there",)),
    Arrival(0, ("What is this?", tiny_image(1))),
    Arrival(1, (tiny_image(2, 64, 160), TEXT)),
    Arrival(3, (tiny_image(1), "and ", tiny_image(3, 128, 96), "?"), cancel_after=3),
    Arrival(4, (TEXT * 2,)),
    Arrival(9, (tiny_image(1), "and ", tiny_image(3, 128, 96), "?")),
    Arrival(12, ("What is this?", tiny_image(1))),
    Arrival(14, ("What is this?", tiny_image(4))),
)


def request_for(prompt: Prompt) -> Request:
    return new_request(prompt, max_tokens=COUNT)


def run_schedule(
    model: LoadedModel, prompts: list[Prompt], layout: str, chunk: int, store: PrefixCache | None
) -> list[Request]:
    engine = new_engine(
        model, layout=layout, scheduler=Alternating, max_chunk=chunk, prefix_cache=store
    )
    requests = [request_for(prompt) for prompt in prompts]
    run_arrivals(engine, SCHEDULE, requests)
    return requests


def check(model: LoadedModel, ask: Any, chunk: int, stored: bool) -> None:
    found = probe(model, model.make_cache, model.kv_layouts)
    assert (found.layout, found.notes) == ("grouped", ())
    store = PrefixCache(budget=lambda: 2**22) if stored else None
    prompts = [ask(model, *parts) for _, parts, _ in SCHEDULE]
    requests = run_schedule(model, prompts, found.layout, chunk, store)
    if store is not None:
        again = run_schedule(model, prompts, found.layout, chunk, store)
        cached = [sum(r.cached_tokens for r in each) for each in (requests, again)]
        assert cached[1] > cached[0]
        check_integrity(store)
        requests += again
    alone = [greedy(model, prompt, COUNT) for prompt in prompts]
    for request, (_, _, cancelled), want in zip(requests, SCHEDULE * 2, alone * 2, strict=False):
        got = output_of(request).tokens
        assert got == want[: len(got) if cancelled is not None else COUNT]


def each_way(names: Sequence[str]) -> list[Any]:
    """(name, chunk, stored): each name in one of the ways; the sweep has all."""
    ways = [(5, True), (64, False), (5, False), (64, True)]
    return [
        pytest.param(name, *way, marks=() if i % len(ways) == j else pytest.mark.sweep)
        for i, name in enumerate(names)
        for j, way in enumerate(ways)
    ]


@pytest.mark.parametrize(("name", "chunk", "stored"), each_way(ALL))
def test_vision_requests_in_a_batch_get_the_tokens_of_each_alone(
    name: str, chunk: int, stored: bool, load, ask
) -> None:
    check(load(name), ask, chunk, stored)


@pytest.mark.parametrize(("name", "chunk", "stored"), each_way(GENERIC))
def test_models_of_the_generic_vision_family_get_the_tokens_of_each_alone(
    name: str, chunk: int, stored: bool, folders, ask
) -> None:
    check(load_any(folders(name), LoadOptions()), ask, chunk, stored)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_a_stored_image_costs_no_vision_tower(
    name: str, load, ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(name)
    seen = note_calls(monkeypatch, type(model), "embed", lambda _, span: span.content_hash)
    store = PrefixCache(budget=lambda: 2**22)
    first = ask(model, TEXT, tiny_image(1), "What is this?")
    other = ask(model, TEXT, tiny_image(2), "What is this?")
    for prompt in (first, first, other):
        run(new_engine(model, prefix_cache=store), request_for(replace(prompt)))
    assert len(seen) == 2
    assert seen[0] != seen[1]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "gemma3"])
def test_text_after_an_image_is_prefilled_in_passes_with_decoding_rows(
    name: str, load, ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(name)
    assert probe(model, model.make_cache, model.kv_layouts).mixes
    stops = note_calls(monkeypatch, type(model), "prefill", lambda _, chunk: chunk.stop)
    stream = request_for(ask(model, "Hello there"))
    stream.max_tokens = 60
    image = request_for(ask(model, TEXT, tiny_image(1), TEXT * 3))
    engine = new_engine(model, mixes=True, scheduler=Alternating, max_chunk=32)
    for request in (stream, image):
        engine.submit(request)
        while not engine.scheduler.running:
            engine.step()
    run(engine)
    (span,) = image.prompt.spans
    assert span.end <= max(stops) < len(image.prompt.tokens), "the image had passes of its own"
    for request in (stream, image):
        assert output_of(request).tokens == greedy(model, request.prompt, request.max_tokens)
