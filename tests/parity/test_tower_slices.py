"""A vision tower that runs a slice of layers per step while streams decode."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_provider import LoadedModel, LoadOptions, MediaItem
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import Phase, Request
from mlx_provider.families.checkpoint import read_json
from mlx_provider.families.vision import loading as slices
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from mlx_provider_qwen3_vl import model as patch_model
from tiny import build

LAYERS = 8
DEPTH = {"qwen3_vl": "depth", "gemma3": "num_hidden_layers", "qwen2_vl": "depth"}
LAYER_SECONDS = 0.04


def deep(folder: Path, name: str) -> LoadedModel:
    """A tiny model whose tower has 8 layers."""
    config = read_json(build(folder / "shallow", name) / "config.json")
    vision = config["vision_config"] | {DEPTH[name]: LAYERS}
    build(folder / "deep", name, vision_config=vision)
    family, _ = PluginRegistry.discover({}).family_for(config)
    return family.load(folder / "deep", LoadOptions())


@pytest.fixture(scope="module", params=sorted(DEPTH))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return deep(tmp_path_factory.mktemp("tower"), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return deep(tmp_path_factory.mktemp("tower"), "qwen3_vl")


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
    """Each slice of the tower advances a clock that does not move otherwise."""

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
        for at, made in enumerate(self.inner.embed_in_slices(spans), 1):
            if at == self.fails_at:
                raise ArithmeticError("a slice failed")
            self.now += self.seconds
            self.ran.append(at)
            yield made


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


def test_slices_give_the_features_of_the_whole_tower(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = asked(model, [picture(1)]).prompt.spans[0]
    steps = list(model.embed_in_slices([span]))  # type: ignore[attr-defined]
    assert len(steps) >= LAYERS
    assert [len(made) for made in steps] == [0] * (len(steps) - 1) + [1]
    monkeypatch.setattr(slices, "_layers", lambda part: ())  # the plain call of upstream
    whole = model.embed(span)
    assert mx.array_equal(steps[-1][0].rows, whole.rows)
    for own, theirs in zip(steps[-1][0].deepstack, whole.deepstack, strict=True):
        assert mx.array_equal(own, theirs)


class Chain(nn.Module):
    """Four layers that each make 1 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.LayerNorm(256, affine=False) for _ in range(4)]

    def __call__(self, x: mx.array) -> list[mx.array]:
        return list(accumulate(self.layers, lambda made, layer: layer(made), initial=x))[1:]


@pytest.mark.parametrize(("kept", "grows"), [(slice(None), [1, 2, 3]), (slice(-1, None), [1] * 3)])
def test_a_step_computes_one_layer_and_keeps_the_inputs_of_the_others(
    kept: slice, grows: list[int]
) -> None:
    chain, x = Chain(), mx.random.normal((1024, 256))
    mx.eval(x)
    gc.collect()
    base, used = mx.get_active_memory(), []
    for _ in slices.in_slices([chain], lambda: chain(x)[kept]):
        used.append(round((mx.get_active_memory() - base) / 2**20))
    assert used == grows


def test_a_stream_continues_between_slices(model: LoadedModel) -> None:
    timed = Timed(model)
    engine, stream = beside_a_stream(timed)
    image = asked(model, [picture(1)])
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
        assert output_of(request).tokens == output_of(solo(model, request)).tokens


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


def test_images_of_a_prompt_pass_through_a_packing_tower_together(
    qwen: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of several sizes and the frames of a video: each attends only to itself."""
    calls: list[list[int]] = []
    tower = type(qwen.model.vision_tower)
    plain = tower.__call__

    def counted(self: Any, pixels: mx.array, grids: mx.array) -> Any:
        calls.append([t * h * w for t, h, w in grids.tolist()])
        return plain(self, pixels, grids)

    monkeypatch.setattr(tower, "__call__", counted)
    frames = np.random.default_rng(5).integers(0, 256, (6, 64, 64, 3), dtype=np.uint8)
    items = [picture(1), MediaItem.of("video", frames, "frames"), picture(2, 128, 64)]
    prompt = asked(qwen, items).prompt
    apart = [qwen.embed(span) for span in prompt.spans]
    assert len(calls) == len(prompt.spans) == 5
    calls.clear()
    (together,) = [made for made in qwen.embed_in_slices(prompt.spans) if made]  # type: ignore[attr-defined]
    assert calls == [[24, 16, 16, 16, 32]]
    for own, alone in zip(together, apart, strict=True):
        assert mx.allclose(own.rows, alone.rows, atol=1e-6)
        assert all(map(mx.allclose, own.deepstack, alone.deepstack))
    calls.clear()
    monkeypatch.setattr(patch_model, "PATCHES", 48)
    counts = [len(made) for made in qwen.embed_in_slices(prompt.spans) if made]  # type: ignore[attr-defined]
    assert counts == [2, 2, 1]
    assert calls == [[24, 16], [16, 16], [32]]


def test_features_of_a_batch_keep_no_memory_of_the_others(qwen: LoadedModel) -> None:
    spans = asked(qwen, [picture(at, 512, 512) for at in range(3)]).prompt.spans
    gc.collect()
    base = mx.get_active_memory()
    (made,) = [each for each in qwen.embed_in_slices(spans) if each]  # type: ignore[attr-defined]
    whole = mx.get_active_memory() - base
    del made[1:]
    assert mx.get_active_memory() - base < whole / 2
