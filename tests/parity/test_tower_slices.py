"""A family's vision tower that runs a slice of layers per step while streams decode."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mlx_provider import LoadedModel, LoadOptions, MediaItem
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import Phase, Request
from mlx_provider.families.checkpoint import read_json
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from tiny import build

LAYERS = 8
LAYER_SECONDS = 0.04


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = build(tmp_path_factory.mktemp("tower") / "qwen", "qwen3_vl")
    family, _ = PluginRegistry.discover({}).family_for(read_json(folder / "config.json"))
    return family.load(folder, LoadOptions())


def picture(seed: int, height: int = 64, width: int = 96) -> MediaItem:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return MediaItem.of("image", pixels, f"picture {seed}")


def asked(model: LoadedModel, images: Sequence[MediaItem], max_tokens: int = 6) -> Request:
    content = [*({"type": item.kind} for item in images), {"type": "text", "text": "what is this?"}]
    messages = [{"role": "user", "content": content}]
    prompt = model.prepare(messages, tools=[], media=images, variables={})
    request = new_request(prompt.tokens, max_tokens=max_tokens)
    request.prompt = prompt
    return request


@dataclass
class Timed:
    """A model whose tower has 8 slices for each image. Each advances a clock that does not move
    otherwise."""

    inner: Any
    seconds: float = LAYER_SECONDS
    now: float = 0.0
    fails_at: int = 0
    """The slice that raises; 0: none."""
    ran: list[int] = field(default_factory=list)
    """The slices that ran, counted from 1 for each image request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def embed_in_slices(self, spans: Any) -> Iterator[Any]:
        for at in range(1, LAYERS * len(spans) + 1):
            if at == self.fails_at:
                raise ArithmeticError("a slice failed")
            self.now += self.seconds
            self.ran.append(at)
            yield () if at % LAYERS else [self.inner.embed(spans[at // LAYERS - 1])]


def beside_a_stream(model: Timed) -> tuple[Engine, Request]:
    engine = new_engine(model, clock=lambda: model.now)  # type: ignore[arg-type]
    stream = new_request([30] * 8, max_tokens=60)
    engine.submit(stream)
    while len(output_of(stream).tokens) < 3:  # the first tokens come together
        engine.step()
    return engine, stream


def solo(model: LoadedModel, request: Request) -> Request:
    """The same request in a separate engine."""
    twin = new_request(request.prompt.tokens, max_tokens=request.max_tokens)
    twin.prompt = request.prompt
    engine = new_engine(model, layout="solo", max_chunk=4096)
    engine.submit(twin)
    run(engine)
    return twin


def test_a_stream_continues_between_slices(qwen: LoadedModel) -> None:
    timed = Timed(qwen)
    engine, stream = beside_a_stream(timed)
    image = asked(qwen, [picture(1)])
    engine.submit(image)
    gaps, tokens = [], len(output_of(stream).tokens)
    while not image.features:
        began = timed.now
        engine.step()
        gaps.append(round((timed.now - began) / LAYER_SECONDS))
        tokens += 1
        assert len(output_of(stream).tokens) == tokens, "one in each step"
    assert sum(gaps) == len(timed.ran) >= LAYERS
    assert max(gaps) == 2, "as many layers as fit the stall target of 0.1 s"
    assert gaps.count(2) >= len(gaps) - 2, "but for the first and the last step"
    run(engine)
    for request in (stream, image):
        assert output_of(request).tokens == output_of(solo(qwen, request)).tokens


def test_steps_without_a_slice_follow_a_slice_beyond_the_stall_target(
    qwen: LoadedModel,
) -> None:
    timed = Timed(qwen, seconds=0.3)
    engine, _ = beside_a_stream(timed)
    image = asked(qwen, [picture(1)])
    engine.submit(image)
    steps = 0
    while not image.features:
        engine.step()
        steps += 1
    assert steps >= 3 * len(timed.ran), "0.1 s is a token's on average"


def test_without_decoding_rows_the_tower_runs_at_once(qwen: LoadedModel) -> None:
    timed = Timed(qwen)
    engine = new_engine(timed, clock=lambda: timed.now)  # type: ignore[arg-type]
    engine.submit(asked(qwen, [picture(1)]))
    steps = 0
    while not timed.ran or timed.ran[-1] < LAYERS:
        engine.step()
        steps += 1
    assert steps == 1


@pytest.mark.parametrize("ending", ["cancel", "failure"])
def test_a_tower_that_ends_early_affects_no_other_request(qwen: LoadedModel, ending: str) -> None:
    timed = Timed(qwen, fails_at=5 if ending == "failure" else 0)
    engine, stream = beside_a_stream(timed)
    image = asked(qwen, [picture(2)])
    engine.submit(image)
    while len(timed.ran) < 4:
        engine.step()
    (job,) = engine.scheduler.waiting
    run_of = weakref.ref(job.tower)  # type: ignore[arg-type]
    assert run_of() is not None
    if ending == "cancel":
        engine.cancel(image)
    else:
        engine.step()
    gc.collect()
    assert image.phase is Phase.DONE
    assert run_of() is None, "what it had computed is free"
    run(engine)
    assert output_of(stream).tokens == output_of(solo(qwen, stream)).tokens
    timed.fails_at = 0
    again = asked(qwen, [picture(2)])
    engine.submit(again)
    run(engine)
    assert output_of(again).tokens == output_of(solo(qwen, again)).tokens


def test_a_short_prompt_overtakes_a_tower(qwen: LoadedModel) -> None:
    timed = Timed(qwen)
    engine, _ = beside_a_stream(timed)
    image = asked(qwen, [picture(3)])
    engine.submit(image)
    engine.step()
    text = new_request([40] * 4, max_tokens=2)
    engine.submit(text)
    while not output_of(text).tokens:
        engine.step()
    assert not image.features
    run(engine)
