"""Vectors in the engine: equal in any batch, no delay of streams, no memory left behind."""

from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from equipped import equipped
from mlx_provider import LoadOptions, Pooling
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.inputs import Inputs
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Phase, Request
from mlx_provider.engine.scheduling.costs import Costs, Curve
from mlx_provider.errors import BadRequest
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.protocol.events import Done, Embedded, Event, Failed
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from quantised import quantise
from references import assert_as_alone
from stepping import step_until, submit
from tiny import build

TEXTS = [[30 + (i * k) % 200 for i in range(n)] for k, n in ((3, 5), (7, 90), (11, 33), (5, 1))]
SHARES_PASSES = {"mixes": True, "max_chunk": 64}


def new_embedding(
    inputs: Sequence[Sequence[int]],
    pooling: Pooling = "last",
    *,
    dimensions: int = 2**20,
    normalise: bool = True,
    **more: Any,
) -> Request:
    """A request for the vectors of raw tokens; see `vectors_of`."""
    wanted = Inputs(inputs, pooling, dimensions, normalise)
    request = new_request(wanted.longest.tokens, max_tokens=0, inputs=wanted, **more)
    request.id = f"e{id(inputs):x}"
    return request


def vectors_of(events: Sequence[Event]) -> list[NDArray[np.float32]]:
    """The vectors among the events of a request, in the order of its inputs."""
    found = {e.index: e.vector for e in events if isinstance(e, Embedded)}
    return [np.frombuffer(b64decode(found[at]), "<f4") for at in range(len(found))]


def events_of(engine: Engine, request: Request) -> list[Event]:
    """The events of one request, after the engine has become idle."""
    found: list[Event] = []
    while not engine.idle:
        for each, events in engine.step():
            found += events if each is request else []
    return found


def embedded(engine: Engine, texts: Sequence[Sequence[int]], *how: Any, **more: Any) -> list[Any]:
    """The vectors of some texts, from an engine that may have other requests."""
    request = new_embedding(texts, *how, **more)
    engine.submit(request)
    return vectors_of(events_of(engine, request))


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_a_vector_is_made_of_the_states_of_its_text(qwen3: TextModel, pooling: Any) -> None:
    found = embedded(new_engine(qwen3), TEXTS, pooling)
    for tokens, vector in zip(TEXTS, found, strict=True):
        states = np.array(qwen3.model.model(mx.array([tokens]))[0], np.float64)
        wanted = {"last": states[-1], "mean": states.mean(axis=0), "cls": states[0]}[pooling]
        np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), atol=2e-6)


def test_fewer_dimensions_have_length_1_again(qwen3: TextModel) -> None:
    engine = new_engine(qwen3)
    (whole,), (cut,) = embedded(engine, TEXTS[:1]), embedded(engine, TEXTS[:1], dimensions=16)
    (plain,) = embedded(engine, TEXTS[:1], dimensions=16, normalise=False)
    assert (whole.size, cut.size, plain.size) == (64, 16, 16)
    np.testing.assert_allclose(cut, whole[:16] / np.linalg.norm(whole[:16]), rtol=1e-6)
    np.testing.assert_allclose(cut, plain / np.linalg.norm(plain), rtol=1e-6)
    assert abs(np.linalg.norm(plain) - 1) > 0.1


@pytest.mark.parametrize(
    ("family", "form", "pooling"),
    [
        ("qwen3", "float32", "mean"),
        ("qwen3", "bfloat16", "mean"),
        ("qwen3", "4bit", "last"),
        ("gemma3_text", "bfloat16", "last"),
        ("qwen3_5_text", "bfloat16", "mean"),
    ],
)
def test_a_vector_is_the_same_in_any_batch(
    tmp_path: Path, family: str, form: str, pooling: Any
) -> None:
    folder = build(tmp_path / "m", family, dtype="float32" if form == "4bit" else form)
    if form == "4bit":
        quantise(folder, family, dtype="bfloat16")
    model = equipped(load_text(folder, LoadOptions()))
    grid = 32 if family == "qwen3_5_text" else 1
    alone = [embedded(new_engine(model, max_chunk=64, grid=grid), [t], pooling)[0] for t in TEXTS]
    engine = new_engine(model, **SHARES_PASSES, grid=grid)
    for first in range(3):
        engine.submit(new_request([33 + first] * (40 * first + 3), max_tokens=30))
    for _ in range(4):
        engine.step()
    # slower than measured, so that other plans have smaller chunks
    engine.scheduler.costs.pace["chunk"] = 50.0
    together = embedded(engine, [*TEXTS[::-1], *TEXTS], pooling)
    for one, other in zip([*alone[::-1], *alone], together, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_stream_gets_a_token_in_every_step_beside_200_long_texts(qwen3: TextModel) -> None:
    """A pass over 32 tokens takes a stall target: no step holds more of the texts than that."""
    curve = Curve(((1, 0.001), (32, 0.1), (64, 0.2)))
    costs = Costs(curve)  # a clock that stands still corrects them nowhere
    engine = new_engine(qwen3, mixes=True, max_chunk=512, costs=costs, clock=lambda: 0.0)
    stream = new_request([40] * 5, max_tokens=60)
    engine.submit(stream)
    step_until(engine, lambda: len(output_of(stream).tokens) >= 2)  # tokens are read a step later
    texts = [[30 + (i + at) % 200 for i in range(300)] for at in range(200)]
    request = new_embedding(texts)
    engine.submit(request)
    while stream.phase is not Phase.DONE:
        before, prefilled = len(output_of(stream).tokens), request.prefilled_tokens
        engine.step()
        assert len(output_of(stream).tokens) == before + 1 or stream.phase is Phase.DONE
        assert 0 < request.prefilled_tokens - prefilled <= 32
    assert_as_alone(qwen3, stream)
    engine.cancel(request)
    run(engine)


def test_a_prompt_runs_before_the_rest_of_many_texts(qwen3: TextModel) -> None:
    engine = new_engine(qwen3)
    many, prompt = new_embedding([[40] * 9] * 50), new_request([41] * 100, max_tokens=1)
    few = new_embedding([[42] * 9] * 2)
    submit(engine, many, prompt, few)
    ended = []
    while not engine.idle:
        ended += [r for r, events in engine.step() if isinstance(events[-1], Done)]
    assert ended == [few, prompt, many]
    assert many.prompt_tokens == many.prefilled_tokens == 450


def test_texts_do_not_use_the_prefix_cache(
    qwen3: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    kept = PrefixCache(budget=lambda: 2**30)
    engine = new_engine(qwen3, prefix_cache=kept)
    prompt = [30 + i % 50 for i in range(100)]
    for _ in range(2):
        request = new_embedding([prompt, prompt])
        submit(engine, request, steps=1)
        run(engine)
        assert request.prefilled_tokens == 200
    stopped = new_embedding([prompt])
    submit(engine, stopped, steps=4)
    assert stopped.prefilled_tokens > 32
    engine.cancel(stopped)
    run(engine)
    assert kept.nbytes == 0
    assert not caplog.records, "nor was it tried"


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_a_cancelled_request_leaves_nothing(qwen3: TextModel, steps: int) -> None:
    engine = new_engine(qwen3)
    request = new_embedding([[40] * 40] * 20, "mean")
    submit(engine, request, steps=steps)
    engine.cancel(request)
    assert not engine.scheduler.waiting
    run(engine)
    assert engine.idle
    assert request.phase is Phase.DONE
    assert engine.scheduler.live_bytes == 0
    assert len(embedded(engine, TEXTS)) == len(TEXTS)


def test_a_vector_with_nan_fails_alone(qwen3: TextModel, monkeypatch: Any) -> None:
    engine = new_engine(qwen3)
    stream, broken = new_request([40] * 5, max_tokens=20), new_embedding([[41] * 4, [42] * 4])
    shown = type(qwen3).prefill_hidden

    def spoilt(model: TextModel, chunk: Any, last: int) -> Any:
        logits, states = shown(model, chunk, last)
        return logits, states * (np.nan if chunk.prompt.tokens[0] == 42 else 1)

    monkeypatch.setattr(type(qwen3), "prefill_hidden", spoilt)
    submit(engine, stream, broken)
    events = events_of(engine, broken)
    assert len(vectors_of(events)) == 1
    assert isinstance(events[-1], Failed)
    assert events[-1].error.message == "the model gives no finite vector for input 1"
    assert len(output_of(stream).tokens) == 20


def test_texts_wait_for_memory_and_reserve_that_of_the_longest(qwen3: TextModel) -> None:
    room = {"bytes": 1000}
    engine = new_engine(qwen3, available=lambda: room["bytes"])
    request = new_embedding([[40] * 9, [41] * 300, [42] * 9])
    engine.scheduler.check(request)
    need = engine.scheduler.ledger.reservation(request.rows)
    assert 300 < need < 1000, "the longest, and none of the others"
    with pytest.raises(BadRequest, match=r"needs .* bytes of cache"):
        engine.scheduler.check(new_embedding([[40] * 9, [41] * 1500]))
    room["bytes"] = need - 1
    submit(engine, request, steps=3)
    assert request.phase is Phase.WAITING
    room["bytes"] = need
    assert len(vectors_of(events_of(engine, request))) == 3


def test_a_text_starts_again_when_the_pass_before_it_has_failed(qwen3: TextModel) -> None:
    """The engine did not wait for that pass, so it cannot know whether its chunk was computed."""
    engine = new_engine(qwen3, max_chunk=16)
    submit(engine, new_request([40] * 5, max_tokens=30), steps=1)
    request = new_embedding([TEXTS[1]], "mean")
    submit(engine, request, steps=3)
    assert 0 < request.prefilled_tokens < 90
    assert engine.batch.mixed.restart_prompts() is False
    (job,) = engine.scheduler.waiting
    assert (job.cache, job.computed_tokens) == (None, 0)
    (again,) = vectors_of(events_of(engine, request))
    (wanted,) = embedded(new_engine(qwen3, max_chunk=16), [TEXTS[1]], "mean")
    assert again.tobytes() == wanted.tobytes()
