"""The images of a prompt run through the vision tower in several steps while streams decode."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from equipped import load_by_family
from mlx_provider import LoadedModel, MediaItem
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import Phase, Request
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from references import assert_as_alone
from stepping import step_until
from tiny import build
from wrapped_model import WrappedModel

IMAGES = 8
IMAGE_SECONDS = 0.04


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = build(tmp_path_factory.mktemp("tower") / "qwen", "qwen3_vl")
    return load_by_family(folder)


def picture(seed: int, height: int = 64, width: int = 96) -> MediaItem:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return MediaItem.of("image", pixels, f"picture {seed}")


def asked(model: LoadedModel, images: Sequence[MediaItem], max_tokens: int = 6) -> Request:
    content = [*({"type": item.kind} for item in images), {"type": "text", "text": "what is this?"}]
    messages = [{"role": "user", "content": content}]
    prompt = model.prepare(messages, tools=[], media=images, variables={})
    return new_request(prompt, max_tokens=max_tokens)


@dataclass
class Timed(WrappedModel):
    """A model whose tower advances a clock, for each image, that does not move otherwise."""

    seconds: float = IMAGE_SECONDS
    now: float = 0.0
    fails_at: int = 0
    """The image that raises, counted from 1; 0: none."""
    ran: list[Any] = field(default_factory=list)
    """The images that ran."""

    def embed(self, span: Any) -> Any:
        if len(self.ran) + 1 == self.fails_at:
            raise ArithmeticError("a tower failed")
        self.now += self.seconds
        self.ran.append(span)
        return self.inner.embed(span)


def several(model: LoadedModel, first: int = 1) -> Request:
    return asked(model, [picture(first + at) for at in range(IMAGES)])


def beside_a_stream(model: Timed) -> tuple[Engine, Request, Request]:
    """An engine with a stream, and with several images that are submitted now."""
    engine = new_engine(model, clock=lambda: model.now)  # type: ignore[arg-type]
    stream = new_request([30] * 8, max_tokens=60)
    engine.submit(stream)
    step_until(engine, lambda: len(output_of(stream).tokens) >= 3)  # the first tokens come together
    request = several(model.inner)
    engine.submit(request)
    return engine, stream, request


def test_a_stream_continues_between_images(qwen: LoadedModel) -> None:
    timed = Timed(qwen)
    engine, stream, request = beside_a_stream(timed)
    gaps, tokens = [], len(output_of(stream).tokens)
    while len(request.features) < IMAGES:
        began = timed.now
        engine.step()
        gaps.append(round((timed.now - began) / IMAGE_SECONDS))
        tokens += 1
        assert len(output_of(stream).tokens) == tokens, "one in each step"
    assert sum(gaps) == len(timed.ran) == IMAGES
    assert max(gaps) == 2, "as many images as fit the stall target of 0.1 s"
    assert gaps.count(2) >= len(gaps) - 2, "but for the first and the last step"
    run(engine)
    assert_as_alone(qwen, stream, request)


def test_steps_without_an_image_follow_one_beyond_the_stall_target(qwen: LoadedModel) -> None:
    timed = Timed(qwen, seconds=0.3)
    engine, _, request = beside_a_stream(timed)
    steps = 0
    while len(request.features) < IMAGES:
        engine.step()
        steps += 1
    assert steps >= 3 * (IMAGES - 1), "0.1 s is a token's on average"


def test_without_decoding_rows_all_images_run_at_once(qwen: LoadedModel) -> None:
    timed = Timed(qwen)
    engine = new_engine(timed, clock=lambda: timed.now)  # type: ignore[arg-type]
    engine.submit(several(qwen))
    step_until(engine, lambda: timed.ran)
    assert len(timed.ran) == IMAGES


@pytest.mark.parametrize("ending", ["cancel", "failure"])
def test_a_tower_that_ends_early_affects_no_other_request(qwen: LoadedModel, ending: str) -> None:
    timed = Timed(qwen, fails_at=5 if ending == "failure" else 0)
    engine, stream, request = beside_a_stream(timed)
    step_until(engine, lambda: len(timed.ran) >= 4)
    if ending == "cancel":
        engine.cancel(request)
    else:
        engine.step()
    assert request.phase is Phase.DONE
    assert not request.features, "what it had computed is free"
    run(engine)
    assert_as_alone(qwen, stream)
    timed.fails_at = 0
    again = several(qwen)
    run(engine, again)
    assert_as_alone(qwen, again)


def test_a_short_prompt_overtakes_a_tower(qwen: LoadedModel) -> None:
    timed = Timed(qwen)
    engine, _, request = beside_a_stream(timed)
    engine.step()
    text = new_request([40] * 4, max_tokens=2)
    engine.submit(text)
    step_until(engine, lambda: output_of(text).tokens)
    assert len(request.features) < IMAGES
    run(engine)
