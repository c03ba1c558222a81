"""Requests that come and go, served with and without drafts, and compared with plain decoding."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlx_provider import LoadedModel, MediaItem
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.speculation.speculation import Speculation, source_of
from mlx_provider.records import Drafter, DraftOptions
from mlx_provider.testing.driver import Alternating, Eager, new_engine, new_request, output_of
from references import alone, assert_near_alone
from schedules import run_arrivals

TinyModels = Callable[..., Any]
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5)


@dataclass(frozen=True)
class Arrival:
    """One request of a scenario."""

    step: int = 0
    length: int = 20
    word: int = 0
    """Prompts of the same word share their beginning."""
    max_tokens: int = 14
    params: SamplingParams = GREEDY
    n: int = 1
    cancel_after: int | None = None
    images: tuple[int, ...] = ()


SCENARIOS = {
    "solo": [Arrival(max_tokens=30)],
    "six": [Arrival(length=9 + 11 * i, word=i) for i in range(6)],
    "staggered": [
        Arrival(0, 40, 0, 20, n=2),
        Arrival(3, 7, 1, 14, SAMPLED),
        Arrival(5, 70, 2, 12),
        Arrival(8, 1, 3, 14),
        Arrival(9, 40, 0, 9, SAMPLED, n=2),
    ],
    "cancelled": [
        Arrival(0, 33, 0, 30, cancel_after=9),
        Arrival(1, 20, 1, 14, SAMPLED),
        Arrival(2, 50, 2, 30, cancel_after=6),
        Arrival(4, 12, 3, 10),
    ],
}
IMAGES = [
    Arrival(0, 6, 0, 16, images=(0,)),
    Arrival(1, 9, 1, 12),
    Arrival(2, 4, 2, 12, SAMPLED, images=(1, 0)),
    Arrival(6, 6, 0, 12, images=(0,)),
    Arrival(7, 3, 3, 12, images=(1,), cancel_after=4),
]


def picture(seed: int) -> MediaItem:
    shape = (64 + 32 * seed, 96, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return MediaItem.of("image", pixels, hashlib.sha256(pixels.tobytes()).hexdigest())


def request_of(model: LoadedModel, arrival: Arrival) -> Request:
    tokens = [20 + (arrival.word * 97 + 31 * i) % 340 for i in range(arrival.length)]
    more = {"max_tokens": arrival.max_tokens, "n": arrival.n, "logprobs": 2}
    request = new_request(tokens, params=replace(arrival.params), **more)
    request.prompt = replace(request.prompt, snapshot_points=[64] if len(tokens) > 64 else [])
    if arrival.images:
        content = [*({"type": "image"} for _ in arrival.images), {"type": "text", "text": "see"}]
        request.prompt = model.prepare(
            [{"role": "user", "content": content}],
            tools=[],
            media=[picture(i) for i in arrival.images],
            variables={},
        )
    return request


def drafted(drafter: Drafter, found: Any, options: DraftOptions | None = None) -> Speculation:
    """The drafter at work for a tiny model, whatever its drafts cost."""
    options = options or DraftOptions()
    assert drafter.refuses(found.folder, found.model, options) == ""
    drafting = drafter.start(found.folder, found.model, options)
    source = source_of(drafter, drafting, found.model)
    return Speculation(source, vocab=found.model.info.vocab_size, policy=Eager())


def served(model: LoadedModel, arrivals: Sequence[Arrival], **more: Any) -> list[Request]:
    engine = new_engine(model, scheduler=Alternating, **more)
    requests = [request_of(model, arrival) for arrival in arrivals]
    run_arrivals(engine, arrivals, requests)
    return requests


def check(model: LoadedModel, arrivals: Sequence[Arrival], requests: Sequence[Request]) -> None:
    for arrival, request in zip(arrivals, requests, strict=True):
        assert_near_alone(model, request, whole=not arrival.cancel_after)


def accepted(requests: Sequence[Request]) -> float:
    """Share of the drafts that held."""
    return sum(r.accepted for r in requests) / sum(r.drafted for r in requests)


def check_steady(model: LoadedModel, arrivals: Sequence[Arrival], speculation: Speculation) -> None:
    """Whoever gets the same tokens alone and among others gets them with drafts."""
    plain = [output_of(r).tokens for r in served(model, arrivals)]
    by_itself = [output_of(alone(model, request_of(model, each))).tokens for each in arrivals]
    found = [output_of(r).tokens for r in served(model, arrivals, speculation=speculation)]
    steady = [i for i in range(len(arrivals)) if plain[i] == by_itself[i]]
    assert steady
    assert [found[i] for i in steady] == [plain[i] for i in steady]
