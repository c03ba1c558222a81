"""Parity: with any other requests, a request gets the tokens and logprobs that it gets alone."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integrity import check_integrity
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.families.text import TextModel
from mlx_provider.serving.probe import probe
from mlx_provider.testing.driver import Alternating, new_engine, new_request, output_of, run
from references import alone, assert_near_alone, quantised
from schedules import ARRIVALS, Arrival, run_schedule

FAMILIES = (
    "llama", "qwen3", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5_text", "nemotron_h",
    "jamba", "rwkv7", "deepseek_v3", "llama4", "afm7",
)  # fmt: skip
RARER = ("llama", "gemma3_text", "gpt_oss", "jamba", "llama4")
"""Left to the sweep: another of these families has the same kinds of cache."""
Tiny = Callable[..., TextModel]


def check_against_solo(model: TextModel, arrivals: list[Arrival], requests: list[Request]) -> None:
    """Compare with each request alone."""
    for arrival, request in zip(arrivals, requests, strict=True):
        whole = arrival.cancel_after is None and arrival.fails_at is None
        assert_near_alone(model, request, whole=whole)


@pytest.mark.parametrize("examples", [1, pytest.param(20, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=pytest.mark.sweep if each in RARER else ()) for each in FAMILIES],
)
def test_in_any_schedule_each_request_gets_its_solo_result(
    tiny: Tiny, family: str, examples: int
) -> None:
    model = tiny(family)
    found = probe(model, model.make_cache, model.kv_layouts)
    # shared by all examples, so that it has most prompts
    prefix_cache = PrefixCache(budget=lambda: 2**20)

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(
        arrivals=ARRIVALS,
        chunk=st.sampled_from([16, 32, 64]),
        stored=st.booleans(),
        scheduler=st.sampled_from([Scheduler, Alternating]),
        guessed=st.sampled_from([None, 0.4, 0.9] if found.drafts else [None]),
    )
    def check(
        arrivals: list[Arrival],
        chunk: int,
        stored: bool,
        scheduler: type[Scheduler],
        guessed: float | None,
    ) -> None:
        kept = prefix_cache if stored else None
        requests = run_schedule(
            model,
            arrivals,
            found.layout,
            chunk,
            kept,
            scheduler=scheduler,
            mixes=found.mixes,
            guessed=guessed,
            answered=alone,
            min_shared=16 if found.shares else None,
        )
        check_against_solo(model, arrivals, requests)
        check_integrity(prefix_cache)

    check()


FEW = (
    Arrival(0, 40, 0, 18, 2, 0, None, None),
    Arrival(1, 7, 1, 20, 1, 3, None, None),
    Arrival(2, 90, 2, 12, 1, 4, None, None),
    Arrival(4, 1, 3, 20, 1, 2, 6, None),
    Arrival(9, 40, 0, 9, 1, 1, None, None),
)


@pytest.mark.parametrize("layout", ["grouped", "merged", "solo"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "jamba"])
def test_any_layout_gives_tokens_of_each_alone(tiny: Tiny, family: str, layout: str) -> None:
    model = tiny(family)
    arrivals = [*FEW, Arrival(12, 19, 2, 20, 1, 5, None, 4)]
    check_against_solo(model, arrivals, run_schedule(model, arrivals, layout, 16))


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.sweep)])
def test_quantised_kv_rows_decode_together_as_alone(tiny: Tiny, bits: int) -> None:
    model = tiny("qwen3", head_dim=32)
    make_cache = quantised(model, bits)
    assert make_cache is not None
    found = probe(model, make_cache, model.kv_layouts)
    assert (found.layout, found.mixes) == ("grouped", True), found.notes
    engine = new_engine(
        model, layout=found.layout, mixes=True, scheduler=Alternating, make_cache=make_cache
    )
    requests = [new_request([20 + i] * (5 + 13 * i), max_tokens=15, logprobs=1) for i in range(5)]
    run(engine, *requests)
    for request in requests:
        assert output_of(request).tokens == output_of(alone(model, request, bits)).tokens


@pytest.mark.parametrize(
    ("family", "share"),
    [
        pytest.param(family, share, marks=() if (i + j) % 2 == 0 else pytest.mark.sweep)
        for i, family in enumerate(["qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text"])
        for j, share in enumerate([0.5, 0.9])
    ],
)
def test_drafts_change_no_tokens(tiny: Tiny, family: str, share: float) -> None:
    model = tiny(family)
    arrivals = [*FEW, Arrival(9, 40, 0, 9, 1, 5, None, 4)]
    kept = PrefixCache(budget=lambda: 2**20)
    for prefix_cache in (None, kept):
        requests = run_schedule(
            model, arrivals, "grouped", 32, prefix_cache, mixes=True, guessed=share, answered=alone
        )
        check_against_solo(model, arrivals, requests)
        accepted = sum(request.accepted for request in requests)
        assert 0.1 < accepted / sum(request.drafted for request in requests) < 0.95
