"""The engine with the head: everybody gets the tokens and logprobs of plain decoding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mlx_provider
from mlx_provider import LoadOptions
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.records import DraftOptions
from mlx_provider.testing.driver import Eager, new_engine, new_request, run
from mlx_provider_mtp import mlx_drafters, start
from mlx_provider_qwen3_5 import load as load_qwen3_5

from .company import (
    IMAGES,
    SAMPLED,
    SCENARIOS,
    Arrival,
    accepted,
    check,
    check_steady,
    drafted,
    served,
)

TinyModels = Callable[..., Any]
MTP = next(drafter for drafter in mlx_drafters() if drafter.name == "mtp")


@pytest.mark.parametrize(
    ("family", "scenario"),
    [*(("qwen3_5_text", name) for name in SCENARIOS), ("qwen3_next", "staggered")],
)
def test_mtp_drafts_keep_tokens_of_text(tiny: TinyModels, family: str, scenario: str) -> None:
    found = tiny(family)
    requests = served(
        found.model,
        SCENARIOS[scenario],
        speculation=drafted(MTP, found),
        mixes=scenario == "staggered",
    )
    check(found.model, SCENARIOS[scenario], requests)
    assert 0.05 < accepted(requests) < 0.95


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_mtp_drafts_keep_the_tokens_of_image_requests(tiny: TinyModels, family: str) -> None:
    found = tiny(family)
    requests = served(found.model, IMAGES, speculation=drafted(MTP, found))
    check(found.model, IMAGES, requests)
    assert all(request.drafted for request in requests[:-1])
    assert accepted(requests[:1]) > 0.05


def test_prefix_hits_with_mtp_drafts_get_the_tokens_of_plain_decoding(tiny: TinyModels) -> None:
    found = tiny("qwen3_5_text")
    kept = PrefixCache(budget=lambda: 2**22)
    arrivals = [Arrival(0, 90, 0), Arrival(20, 90, 0), Arrival(21, 90, 0, 14, SAMPLED)]
    for _ in range(2):
        requests = served(found.model, arrivals, speculation=drafted(MTP, found), prefix_cache=kept)
    check(found.model, arrivals, requests)
    assert all(request.cached_tokens for request in requests)


def test_most_mtp_drafts_of_the_hybrid_demo_are_accepted() -> None:
    folder = Path(mlx_provider.__file__).parent / "demo" / "hybrid"
    model = load_qwen3_5(folder, LoadOptions())
    messages = [{"role": "user", "content": "Tell me a story."}]
    request = new_request([1], max_tokens=60)
    request.prompt = model.prepare(messages, tools=[], media=[], variables={})
    drafting = start(folder, model, DraftOptions())
    speculation = Speculation(Source(drafting, model), vocab=model.info.vocab_size, policy=Eager())
    engine = new_engine(model, speculation=speculation)
    run(engine, request)
    assert request.drafted > 20
    assert accepted([request]) > 0.9


def test_mtp_drafts_keep_the_tokens_of_a_four_bit_model(tiny: TinyModels) -> None:
    found = tiny("qwen3_5_text", bits=4)
    arrivals = [replace(each, max_tokens=9) for each in SCENARIOS["six"][:3]]
    requests = served(found.model, arrivals, speculation=drafted(MTP, found))
    check(found.model, arrivals, requests)
    assert accepted(requests) > 0.05


def test_a_bfloat16_model_with_mtp_drafts_gets_steady_tokens(tiny: TinyModels) -> None:
    found = tiny("qwen3_5_text", dtype="bfloat16")
    arrivals = [replace(each, max_tokens=8) for each in SCENARIOS["six"][:3]]
    check_steady(found.model, arrivals, drafted(MTP, found))
