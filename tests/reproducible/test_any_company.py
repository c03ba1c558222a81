"""With fixed passes a request gives the same bits whoever else is there, and whatever fails."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlx_provider import LoadedModel, PrefillChunk
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.scheduling.chunking import FixedShapes
from mlx_provider.protocol.events import Failed
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from mlx_provider.upstream.cache_classes import layers_of
from mlx_provider.upstream.shared_kv import prefix_of
from wrapped_model import WrappedModel

SHAPES = FixedShapes(rows=3, tokens=16)
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5)
BASE = [20 + 13 * i % 290 for i in range(90)]
"""What prompts begin with."""


@dataclass
class Unsteady(WrappedModel):
    """A model whose decode passes fail when told; everything else is the real model's."""

    fails_now: bool = False
    """The next pass of several rows fails."""
    never_gets: int | None = None
    """Passes that bring a row to this position fail."""
    widths: set[int] = field(default_factory=set)

    def decode(self, tokens: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        self.widths.add(tokens.size)
        logits = self.inner.decode(tokens, cache, positions)
        places: list[int] = positions.tolist()  # type: ignore[assignment]
        together = sum(place > 0 for place in places) > 1
        if (self.fails_now and together) or self.never_gets in places:
            self.fails_now = False
            raise RuntimeError("[metal] command buffer failed")
        return logits


class Rough(WrappedModel):
    """A device that rounds so coarsely by the width of a prompt's pass that everyone sees it."""

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        logits = self.inner.prefill(chunk)
        new = slice(chunk.start, chunk.stop)
        for layer in chunk.cache:
            layer.values[..., new, :] = layer.values[..., new, :] * (
                1 + (new.stop - new.start) / 64
            )
        return mx.round(logits * 4) / 4

    def decode(self, tokens: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        return mx.round(self.inner.decode(tokens, cache, positions) * 4) / 4


@pytest.fixture
def model_of(load: Callable[..., LoadedModel]) -> Callable[..., Any]:
    """A model by family and format, or `rough`."""

    def made(family: str, kept_in: str = "float32") -> Any:
        return Rough(load(family)) if kept_in == "rough" else load(family, kept_in)

    return made


def watched(shared: int = 37, length: int = 45, drawn: bool = False) -> Request:
    tail = [25 + 7 * i % 280 for i in range(length - shared)]
    params = DRAWN if drawn else GREEDY
    tokens = BASE[:shared] + tail
    return new_request(tokens, max_tokens=9, n=2, params=params, logprobs=2)


def other(i: int, shared: int) -> Request:
    tokens = BASE[:shared] + [30 + (17 * i + 5 * j) % 270 for j in range(3 + 11 * i % 29)]
    params = SamplingParams(temperature=0.7, top_k=300 * (i % 2)) if i % 3 else GREEDY
    return new_request(tokens, max_tokens=4 + 3 * i % 11, params=params, logprobs=i % 5)


def bits(request: Request) -> list[Any]:
    """Every token, log-probability and alternative."""
    return [
        (output.tokens, [(each.logprob, each.top) for each in output.logprobs])
        for output in (output_of(request, i) for i in range(len(request.rows)))
    ]


def engine_of(model: Any, **more: Any) -> Engine:
    return new_engine(model, fixed=SHAPES, max_chunk=SHAPES.tokens, **more)


def alone(model: LoadedModel, request: Request) -> list[Any]:
    """What it gives cold and by itself."""
    engine = engine_of(model)
    run(engine, request)
    return bits(request)


class Company:
    """An engine with others, in which something happens at each step."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = Unsteady(model)
        self.limit = 2**40
        self.engine = engine_of(
            self.model, prefix_cache=PrefixCache(budget=lambda: 2**24), available=lambda: self.limit
        )
        self.others: list[Request] = []

    def play(self, event: tuple[Any, ...]) -> None:
        kind, *more = event
        if kind == "joins":
            self.others.append(other(len(self.others), *more))
            self.engine.submit(self.others[-1])
        elif kind == "leaves" and self.others:
            self.engine.cancel(self.others[more[0] % len(self.others)])
        elif kind == "fails":
            self.model.fails_now = True
        elif kind == "memory" and len(self.engine.scheduler.running) > 1:
            # not for the youngest
            self.limit = self.engine.scheduler.live_bytes * 3 // 5
        for _ in range(more[0] if kind == "steps" else 1):
            self.engine.step()
            self.limit = 2**40


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("joins"), st.sampled_from([0, 20, 37, 60])),
        st.tuples(st.just("leaves"), st.integers(0, 5)),
        st.tuples(st.just("steps"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["fails", "memory"])),
    ),
    max_size=6,
)
FULL = [("joins", 37), ("joins", 60), ("joins", 0), ("steps", 8)]
HARD = [("steps", 5), ("memory",), ("joins", 20), ("steps", 4), ("fails",), ("leaves", 1)]


@pytest.mark.parametrize(
    ("family", "kept_in"),
    [
        ("qwen3", "rough"),
        pytest.param("qwen3", "float32", marks=pytest.mark.sweep),
        ("qwen3", "bfloat16"),
        ("qwen3", "4 bit"),
        ("gemma3_text", "4 bit"),
        ("qwen3_5_text", "float32"),
        ("qwen3_5_text", "4 bit"),
    ],
)
def test_a_request_gives_equal_bits_beside_any_other_requests(
    model_of: Callable[..., Any], family: str, kept_in: str
) -> None:
    model = model_of(family, kept_in)
    expected = {drawn: alone(model, watched(drawn=drawn)) for drawn in (False, True)}

    @settings(max_examples=1, suppress_health_check=list(HealthCheck))
    @given(before=EVENTS, after=EVENTS, drawn=st.booleans())
    @example(before=FULL, after=HARD, drawn=False)
    def check(before: Sequence[Any], after: Sequence[Any], drawn: bool) -> None:
        company = Company(model)
        for event in before:
            company.play(event)
        request = watched(drawn=drawn)
        company.engine.submit(request)
        for event in after:
            company.play(event)
        run(company.engine)
        assert bits(request) == expected[drawn]
        assert company.model.widths == {SHAPES.rows}

    check()


@pytest.mark.parametrize("kept_in", ["float32", "4 bit"])
def test_rows_with_one_prefix_have_the_bits_of_each_alone(
    load: Callable[..., LoadedModel], kept_in: str
) -> None:
    """Seven join and leave again. None of them shares its keys with another."""
    model = load("qwen3", kept_in)

    def asked(i: int, reply: int = 5) -> Request:
        tokens = [*BASE[:64], *(30 + (17 * i + 5 * j) % 270 for j in range(9))]
        return new_request(tokens, max_tokens=reply, logprobs=2)

    expected = alone(model, asked(0, reply=30))
    engine = engine_of(model, prefix_cache=PrefixCache(budget=lambda: 2**24), min_shared=16)
    request = asked(0, reply=30)
    engine.submit(request)
    others = [asked(i) for i in range(1, 8)]
    for other in others:
        engine.step()
        engine.submit(other)
    while not engine.idle:
        engine.step()
        layers = [layer for each in engine.batch.layout.passes() for layer in layers_of(each.cache)]
        own = [part for layer in layers for part in getattr(layer, "parts", [layer])]
        assert not any(map(prefix_of, own))
    assert {other.cached_tokens for other in others} == {64}
    assert bits(request) == expected


@pytest.mark.parametrize("event", ["memory", "fails"])
@pytest.mark.parametrize(("family", "kept_in"), [("qwen3", "rough"), ("qwen3_5_text", "float32")])
def test_rows_that_start_again_give_the_same_bits(
    model_of: Callable[..., Any], family: str, kept_in: str, event: str
) -> None:
    model = model_of(family, kept_in)
    request = watched()
    expected = alone(model, watched())
    company = Company(model)
    company.play(("joins", 0))
    company.engine.submit(request)
    while len(request.rows[1].tokens) < 3:
        company.engine.step()
    computed = request.prefilled_tokens
    company.play((event,))
    run(company.engine)
    assert request.prefilled_tokens > computed
    assert bits(request) == expected


@pytest.mark.parametrize(
    ("family", "kept_in"),
    [("qwen3", "rough"), ("gemma3_text", "float32"), ("qwen3_5_text", "float32")],
)
def test_a_request_after_a_prefix_hit_has_the_bits_of_a_cold_one(
    model_of: Callable[..., Any], family: str, kept_in: str
) -> None:
    """Each prompt leaves another one anywhere, inside a pass or a reply, and goes on."""
    model = model_of(family, kept_in)

    @settings(max_examples=1, suppress_health_check=list(HealthCheck))
    @given(sizes=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), max_size=2))
    @example(sizes=[(40, 1), (41, 30), (90, 3)])
    def check(sizes: list[tuple[int, int]]) -> None:
        engine = engine_of(model, prefix_cache=PrefixCache(budget=lambda: 2**24))
        text = list(BASE)
        for shared, more in [*sizes, (71, 20)]:
            prompt = text[:shared] + [33 + (more * i) % 270 for i in range(more)]
            first, again = (new_request(prompt, max_tokens=5, logprobs=1) for _ in range(2))
            run(engine, first)
            assert first.cached_tokens % SHAPES.tokens == 0
            expected = alone(model, new_request(prompt, max_tokens=5, logprobs=1))
            assert bits(first) == expected
            run(engine, again)
            assert again.cached_tokens == SHAPES.whole(len(prompt) - 1)
            assert bits(again) == expected
            text = prompt + output_of(first).tokens + text[len(prompt) :]

    check()


def test_a_recurrent_state_is_stored_under_exactly_its_tokens(
    load: Callable[..., LoadedModel],
) -> None:
    """Of a model of states alone, no layer of which tells how many tokens it holds."""
    model = load("rwkv7")
    engine = engine_of(model, prefix_cache=PrefixCache(budget=lambda: 2**24))
    for length in (45, 75):
        request = new_request(BASE[:length], max_tokens=6, logprobs=1)
        run(engine, request)
        twin = new_request(BASE[:length], max_tokens=6, logprobs=1)
        assert bits(request) == alone(model, twin)
    assert request.cached_tokens == 32


def test_a_failed_row_does_not_change_the_bits_of_others(load: Callable[..., LoadedModel]) -> None:
    model = Unsteady(load("qwen3"), never_gets=105)
    engine = engine_of(model)
    bad = new_request([50] * 100, max_tokens=9)
    others = [watched(), watched(drawn=True)]
    run(engine, *others, bad)
    failed = bad.events.get(0)[-1]
    assert isinstance(failed, Failed)
    assert "command buffer failed" in failed.error.message
    for request, drawn in zip(others, (False, True), strict=True):
        assert bits(request) == alone(model.inner, watched(drawn=drawn))
    assert engine.batch.layout.name == "fixed"
    assert model.widths == {SHAPES.rows}


def test_filler_rows_take_no_memory(load: Callable[..., LoadedModel]) -> None:
    """However long a row decodes beside them."""
    model = load("qwen3_5_text")
    engine = engine_of(model)
    engine.submit(new_request(BASE[:20], max_tokens=40))
    engine.step()
    engine.step()
    (tile,) = engine.batch.layout.passes()
    sizes = set()
    while not engine.idle:
        engine.step()
        if engine.batch.layout.passes():
            filled = [part for layer in tile.cache for part in getattr(layer, "parts", [])[1:]]
            states = [layer for layer in tile.cache if not hasattr(layer, "parts")]
            assert filled
            assert not any(vars(part) for part in filled)
            sizes.add(sum(a.nbytes for state in states for a in state.cache))
    assert len(sizes) == 1
