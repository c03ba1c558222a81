"""Log-probabilities of prompt tokens: equal to those of one pass over the prompt, reported once."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from equipped import equipped
from mlx_provider import LoadOptions
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.protocol.events import Delta, TokenLogprob
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from references import alone, assert_as_alone
from stepping import submit
from tiny import build
from tolerances import logprob_tolerance

PROMPT = [30 + (i * 7) % 200 for i in range(100)]


def scored(tokens: list[int] = PROMPT, **more: Any) -> Request:
    return new_request(tokens, max_tokens=4, logprobs=2, echoed=True, **more)


def told(engine: Engine, request: Request) -> list[list[TokenLogprob]]:
    """The reported log-probabilities of the prompt, by choice."""
    found: list[list[TokenLogprob]] = [[] for _ in request.rows]
    while not engine.idle:
        for each, events in engine.step():
            for event in events if each is request else []:
                if isinstance(event, Delta):
                    found[event.index] += event.logprobs
    return found


def wanted(model: TextModel, tokens: list[int]) -> list[float]:
    logits = np.array(model.model(mx.array([tokens]))[0].astype(mx.float32), np.float64)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return [float(logits[at, token]) for at, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_logprobs_are_those_of_the_whole_prompt(tmp_path: Path, family: str) -> None:
    model = equipped(load_text(build(tmp_path / "m", family), LoadOptions()))
    grid = 32 if family == "qwen3_5_text" else 1
    engine = new_engine(model, max_chunk=64, grid=grid, mixes=True)
    others = [new_request([40 + i] * 9, max_tokens=40) for i in range(2)]
    submit(engine, *others, steps=3)
    request = scored(n=2)
    engine.submit(request)
    first, second = told(engine, request)
    assert first == second
    assert [each.id for each in first] == PROMPT
    assert first[0].logprob is None
    found = [each.logprob for each in first[1:]]
    np.testing.assert_allclose(found, wanted(model, PROMPT), atol=logprob_tolerance())
    assert all(len(each.top) == 2 for each in first[1:])
    assert output_of(request, 1).tokens == output_of(alone(model, request)).tokens
    assert_as_alone(model, *others)


@pytest.mark.parametrize("tokens", [[40], [40, 41]])
def test_a_prompt_of_few_tokens_has_its_logprobs(qwen3: TextModel, tokens: list[int]) -> None:
    request = scored(tokens)
    engine = new_engine(qwen3)
    engine.submit(request)
    (found,) = told(engine, request)
    assert [each.id for each in found] == tokens
    assert len(output_of(request).tokens) == 4


def test_a_stored_prompt_is_run_again_and_its_reply_is_stored(
    qwen3: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    kept = PrefixCache(budget=lambda: 2**30)
    engine = new_engine(qwen3, prefix_cache=kept)
    for _ in range(2):
        request = scored()
        engine.submit(request)
        (found,) = told(engine, request)
        assert len(found) == request.prefilled_tokens == 100
    plain = new_request(PROMPT, max_tokens=4)
    run(engine, plain)
    assert plain.cached_tokens > 90
    assert not caplog.records


def test_a_prefill_that_starts_again_reports_nothing_twice(qwen3: TextModel) -> None:
    engine = new_engine(qwen3)
    request = scored()
    engine.submit(request)
    found: list[TokenLogprob] = []
    for _ in range(3):
        for _, events in engine.step():
            found += [p for e in events if isinstance(e, Delta) for p in e.logprobs]
    assert 0 < len(found) < 100
    (job,) = engine.scheduler.waiting
    job.restart()
    found += told(engine, request)[0]
    assert [each.id for each in found] == PROMPT
    assert request.prefilled_tokens > 100
