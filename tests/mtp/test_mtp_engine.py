"""The engine with the head: everybody gets the tokens and logprobs of plain decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlx_provider
from mlx_provider import LoadedModel, LoadOptions, MediaItem
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.speculation.speculation import Speculation
from mlx_provider.records import DraftOptions
from mlx_provider.testing.driver import Alternating, new_engine, new_request, output_of, run
from mlx_provider.testing.oracle import Eager
from mlx_provider_mtp import start
from mlx_provider_qwen3_5 import load as load_qwen3_5

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


def served(
    model: LoadedModel, arrivals: Sequence[Arrival], drafting: Any = None, **more: Any
) -> list[Request]:
    if drafting is not None:
        more["speculation"] = Speculation(
            drafting, vocab=model.info.vocab_size, shows=model, policy=Eager()
        )
    engine = new_engine(model, scheduler=Alternating, **more)
    requests = [request_of(model, arrival) for arrival in arrivals]
    last, step = max(each.step + (each.cancel_after or 0) for each in arrivals), 0
    while step <= last or not engine.idle:
        for arrival, request in zip(arrivals, requests, strict=True):
            if arrival.step == step:
                engine.submit(request)
            if arrival.step + (arrival.cancel_after or -1000) == step:
                engine.cancel(request)
        engine.step()
        step += 1
        assert step < 1000, "a request never ends"
    return requests


def alone(model: LoadedModel, arrival: Arrival) -> Request:
    (request,) = served(model, [replace(arrival, step=0, cancel_after=None)], layout="solo")
    return request


def check(model: LoadedModel, arrivals: Sequence[Arrival], requests: Sequence[Request]) -> None:
    for arrival, request in zip(arrivals, requests, strict=True):
        reference = alone(model, arrival)
        for choice in range(arrival.n):
            got, want = output_of(request, choice), output_of(reference, choice)
            cut = len(got.tokens) if arrival.cancel_after else len(want.tokens)
            assert got.tokens == want.tokens[:cut]
            for mine, theirs in zip(got.logprobs, want.logprobs, strict=False):
                assert abs(mine.logprob - theirs.logprob) < 1e-4


def accepted(requests: Sequence[Request]) -> float:
    """Share of the drafts that held."""
    return sum(r.accepted for r in requests) / sum(r.drafted for r in requests)


@pytest.mark.parametrize(
    ("family", "scenario"),
    [*(("qwen3_5_text", name) for name in SCENARIOS), ("qwen3_next", "staggered")],
)
def test_text(tiny: TinyModels, family: str, scenario: str) -> None:
    found = tiny(family)
    drafting = start(found.folder, found.model, DraftOptions())
    requests = served(found.model, SCENARIOS[scenario], drafting, mixes=scenario == "staggered")
    check(found.model, SCENARIOS[scenario], requests)
    assert 0.05 < accepted(requests) < 0.95


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_images(tiny: TinyModels, family: str) -> None:
    found = tiny(family)
    drafting = start(found.folder, found.model, DraftOptions())
    requests = served(found.model, IMAGES, drafting)
    check(found.model, IMAGES, requests)
    assert all(request.drafted for request in requests[:-1])
    assert accepted(requests[:1]) > 0.05


def test_prefix_hits(tiny: TinyModels) -> None:
    found = tiny("qwen3_5_text")
    drafting = start(found.folder, found.model, DraftOptions())
    kept = PrefixCache(budget=lambda: 2**22)
    arrivals = [Arrival(0, 90, 0), Arrival(20, 90, 0), Arrival(21, 90, 0, 14, SAMPLED)]
    for _ in range(2):
        requests = served(found.model, arrivals, drafting, prefix_cache=kept)
    check(found.model, arrivals, requests)
    assert all(request.cached for request in requests)


def test_most_guesses_of_the_demo_hold() -> None:
    folder = Path(mlx_provider.__file__).parent / "demo" / "hybrid"
    model = load_qwen3_5(folder, LoadOptions())
    messages = [{"role": "user", "content": "Tell me a story."}]
    request = new_request([1], max_tokens=60)
    request.prompt = model.prepare(messages, tools=[], media=[], variables={})
    drafting = start(folder, model, DraftOptions())
    speculation = Speculation(drafting, vocab=model.info.vocab_size, shows=model, policy=Eager())
    engine = new_engine(model, speculation=speculation)
    engine.submit(request)
    run(engine)
    assert request.drafted > 20
    assert accepted([request]) > 0.9


def test_four_bits(tiny: TinyModels) -> None:
    found = tiny("qwen3_5_text", bits=4)
    drafting = start(found.folder, found.model, DraftOptions())
    arrivals = [replace(each, max_tokens=9) for each in SCENARIOS["six"][:3]]
    requests = served(found.model, arrivals, drafting)
    check(found.model, arrivals, requests)
    assert accepted(requests) > 0.05


def test_bfloat16(tiny: TinyModels) -> None:
    """Whoever gets the same tokens alone and among others gets them with drafts."""
    found = tiny("qwen3_5_text", dtype="bfloat16")
    drafting = start(found.folder, found.model, DraftOptions())
    arrivals = [replace(each, max_tokens=8) for each in SCENARIOS["six"][:3]]
    plain = [output_of(r).tokens for r in served(found.model, arrivals)]
    by_itself = [output_of(alone(found.model, each)).tokens for each in arrivals]
    drafted = [output_of(r).tokens for r in served(found.model, arrivals, drafting)]
    steady = [i for i in range(len(arrivals)) if plain[i] == by_itself[i]]
    assert steady
    assert [drafted[i] for i in steady] == [plain[i] for i in steady]
