"""Parity with images: text and images in one batch, reused images, chunks that cut images."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipped import equipped
from mlx_provider import LoadedModel, LoadOptions, MediaItem
from mlx_provider.engine.inputs import FeatureCache
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.families.checkpoint import read_json
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.probe import probe
from mlx_provider.testing.driver import Alternating, new_engine, new_request, output_of, run
from references import assert_as_alone, assert_near_alone
from schedules import run_arrivals
from tiny import build
from wrapped_model import WrappedModel

FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "gemma3", "qwen3_5", "qwen3_5_moe")
SIZES = ((64, 64), (96, 64), (64, 128), (33, 70))
Load = Callable[[str], LoadedModel]


@pytest.fixture(scope="session")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Load:
    registry = PluginRegistry.discover({})

    @cache
    def get(name: str) -> LoadedModel:
        folder = build(tmp_path_factory.mktemp("vision") / name, name)
        family, _ = registry.family_for(read_json(folder / "config.json"))
        assert family.name == name.removesuffix("_moe")
        return equipped(family.load(folder, LoadOptions()))

    return get


def picture(seed: int) -> MediaItem:
    height, width = SIZES[seed % len(SIZES)]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return MediaItem.of("image", pixels, hashlib.sha256(pixels.tobytes()).hexdigest())


@dataclass(frozen=True)
class Turn:
    """One request: its images by number, how long its text is, and when it comes."""

    step: int
    images: tuple[int, ...]
    words: int
    max_tokens: int
    history: bool
    cancel_after: int | None


TURNS = st.lists(
    st.builds(
        Turn,
        step=st.integers(0, 15),
        images=st.sampled_from([(), (), (0,), (1,), (2,), (3,), (0, 1), (1, 0), (2, 2)]),
        words=st.sampled_from([1, 4, 15]),
        max_tokens=st.integers(1, 14),
        history=st.booleans(),
        cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    ),
    min_size=2,
    max_size=6,
)


def messages_of(turn: Turn) -> list[dict[str, Any]]:
    text = {"type": "text", "text": "what is this " * turn.words}
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in turn.images]
    content: Any = [*parts, text] if parts else text["text"]
    first: dict[str, Any] = {"role": "user", "content": content}
    if not turn.history:
        return [first]
    return [first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "and now"}]


def request_of(model: LoadedModel, turn: Turn) -> Request:
    prompt = model.prepare(
        messages_of(turn), tools=[], media=[picture(i) for i in turn.images], variables={}
    )
    assert len(prompt.spans) == len(turn.images)
    return new_request(prompt, max_tokens=turn.max_tokens, logprobs=1)


@pytest.mark.parametrize("examples", [1, pytest.param(15, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_schedule_gives_tokens_of_each_alone(vision: Load, family: str, examples: int) -> None:
    model = vision(family)
    found = probe(model, model.make_cache, model.kv_layouts)
    assert found.layout != "solo"
    prefix_cache, features = PrefixCache(budget=lambda: 2**22), FeatureCache(2**20)

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(
        turns=TURNS,
        chunk=st.sampled_from([16, 48]),
        stored=st.booleans(),
        scheduler=st.sampled_from([Scheduler, Alternating]),
    )
    def check(turns: list[Turn], chunk: int, stored: bool, scheduler: type[Scheduler]) -> None:
        engine = new_engine(
            model,
            layout=found.layout,
            mixes=found.mixes,
            scheduler=scheduler,
            max_chunk=chunk,
            prefix_cache=prefix_cache if stored else None,
            features=features,
        )
        requests = [request_of(model, turn) for turn in turns]
        run_arrivals(engine, turns, requests)
        for turn, request in zip(turns, requests, strict=True):
            assert_near_alone(model, request, whole=turn.cancel_after is None)

    check()


@dataclass
class CountingEmbeds(WrappedModel):
    """A model that counts how often its vision tower runs."""

    embeds: int = 0

    def embed(self, span: Any) -> Any:
        self.embeds += 1
        return self.inner.embed(span)


def ask(engine: Any, model: LoadedModel, turn: Turn) -> Request:
    request = request_of(model, turn)
    run(engine, request)
    return request


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen3_5"])
def test_an_image_seen_before_costs_no_vision_tower(vision: Load, family: str) -> None:
    model = CountingEmbeds(vision(family))
    engine = new_engine(model, features=FeatureCache(2**20))  # type: ignore[arg-type]
    first = ask(engine, model.inner, Turn(0, (1,), 1, 6, False, None))
    again = ask(engine, model.inner, Turn(0, (1,), 1, 6, False, None))
    assert model.embeds == 1
    assert output_of(first).tokens == output_of(again).tokens
    ask(engine, model.inner, Turn(0, (2,), 1, 6, False, None))
    assert model.embeds == 2


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen3_5"])
def test_repeats_and_next_turns_with_images_reuse_their_prefix(vision: Load, family: str) -> None:
    """A repeated prompt, the next turn, the same image with another question, another image."""
    model = vision(family)
    prefix_cache = PrefixCache(budget=lambda: 2**24)
    engine = new_engine(model, prefix_cache=prefix_cache)
    turn = Turn(0, (0,), 15, 8, False, None)  # long enough for its own snapshot
    cold = ask(engine, model, turn)
    span = cold.prompt.spans[0]
    assert cold.cached_tokens == 0

    repeat = ask(engine, model, turn)
    assert repeat.cached_tokens >= cold.prompt.snapshot_points[-1] - 1 > span.end

    other_question = ask(engine, model, replace(turn, words=1))
    next_turn = ask(engine, model, replace(turn, history=True))
    assert next_turn.cached_tokens > span.end
    assert other_question.cached_tokens >= span.end

    other_image = ask(engine, model, replace(turn, images=(4,)))
    assert picture(4).pixels.shape == picture(0).pixels.shape
    assert other_image.cached_tokens <= other_image.prompt.spans[0].start
    assert_as_alone(model, repeat, other_question, next_turn, other_image)


def test_a_text_request_runs_as_with_the_text_family(vision: Load) -> None:
    model = vision("qwen3_vl")
    request = request_of(model, Turn(0, (), 4, 10, False, None))
    twin = new_request(request.prompt.tokens, max_tokens=10)
    engine = new_engine(model)
    run(engine, twin)
    assert_as_alone(model, twin)
