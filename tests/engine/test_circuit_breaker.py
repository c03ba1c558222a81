"""A feature that failures have switched off is tried again, less often each time; no row fails."""

from typing import Any

import pytest

from failing import Failing, First, decoding, streams
from mlx_provider import isolation
from mlx_provider.engine.execution import batch_layout
from mlx_provider.families.text import TextModel
from mlx_provider.isolation import CircuitBreaker
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from references import assert_as_alone
from stepping import step_until

WAIT = 8


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "FIRST_WAIT", WAIT)


def steps_until_tried(breaker: CircuitBreaker) -> int:
    steps = 1
    while not breaker.record_success(used=False):
        steps += 1
        assert steps < 1000
    return steps


def test_a_breaker_opens_at_the_second_failure_and_waits_twice_as_long_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "LONGEST_WAIT", 4 * WAIT)
    breaker = CircuitBreaker()
    assert (breaker.record_failure(), breaker.closed) == (False, True)
    for wait in (WAIT, 2 * WAIT, 4 * WAIT, 4 * WAIT):
        assert (breaker.record_failure(), breaker.closed) == (True, False)
        assert steps_until_tried(breaker) == wait
        assert breaker.closed


def test_a_failure_of_the_fallback_restarts_the_wait() -> None:
    breaker = CircuitBreaker()
    assert [breaker.record_failure(), breaker.record_failure()] == [False, True]
    assert not any(breaker.record_success(used=False) for _ in range(WAIT - 1))
    assert not breaker.record_failure()
    assert steps_until_tried(breaker) == WAIT


def test_successful_steps_reset_the_failures_and_the_wait() -> None:
    breaker = CircuitBreaker()
    breaker.record_failure()
    assert not any(breaker.record_success(used=False) for _ in range(9 * WAIT))
    assert breaker.record_failure(), "steps that did not use it say nothing of it"
    steps_until_tried(breaker)
    assert not any(breaker.record_success(used=True) for _ in range(2 * WAIT))
    assert [breaker.record_failure(), breaker.record_failure()] == [False, True]
    assert steps_until_tried(breaker) == WAIT


@pytest.mark.parametrize("layout", ["grouped", "merged"])
def test_rows_decode_together_again_once_that_works(qwen3: TextModel, layout: str) -> None:
    broken = [True]
    model = Failing(qwen3, lambda tokens, places: broken[0] and len(tokens) > 1)
    engine = new_engine(model, layout=layout)  # type: ignore[arg-type]
    requests = streams(engine)
    step_until(engine, lambda: engine.batch.layout.name == "solo")
    broken[0] = False
    step_until(engine, lambda: engine.batch.layout.name != "solo")
    decoding = list(engine.scheduler.running)
    assert len(decoding) == 3
    model.decodes.clear()
    engine.step()
    assert model.decodes == [3], "the rows that decoded alone share a pass, and none starts anew"
    run(engine)
    assert engine.batch.layout.name == layout
    assert_as_alone(qwen3, *requests)


def test_rows_that_cannot_be_merged_continue_apart(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [True]
    model = Failing(qwen3, lambda tokens, places: broken[0] and len(tokens) > 1)
    engine = new_engine(model)  # type: ignore[arg-type]
    requests = streams(engine)
    step_until(engine, lambda: engine.batch.layout.name == "solo")
    broken[0] = False
    refused = []

    def refuse(caches: Any) -> None:
        refused.append(caches)
        raise MemoryError("no room to merge")

    monkeypatch.setattr(batch_layout, "merge_rows", refuse)
    run(engine)
    assert refused
    assert "a row cannot be merged with others: MemoryError: no room to merge" in caplog.text
    assert engine.batch.layout.name == "grouped"
    assert_as_alone(qwen3, *requests)


def test_chunks_are_mixed_in_again_once_that_works(qwen3: TextModel) -> None:
    broken = [True]
    model = Failing(qwen3, lambda tokens, places: broken[0] and len(tokens) > 3)
    engine = new_engine(model, mixes=True, max_chunk=32, clock=lambda: 0.0)  # type: ignore[arg-type]
    requests = streams(engine, max_tokens=60)
    step_until(engine, lambda: len(engine.scheduler.running) >= 3)
    for word in (100, 200, 300):
        requests.append(new_request([word + i % 50 for i in range(40)], max_tokens=1))
        engine.submit(requests[-1])
        if word == 300:
            broken[0] = False
            model.decodes.clear()
        step_until(engine, lambda: not requests[-1].unfinished_rows)
        assert engine.batch.mixes == (word == 300), word
        for _ in range(2 * WAIT if word == 200 else 0):
            engine.step()
    run(engine)
    assert max(model.decodes) > 3
    assert engine.batch.layout.name == "grouped"
    assert_as_alone(qwen3, *requests)


def test_a_model_with_only_the_solo_layout_never_tries_to_batch_rows(qwen3: TextModel) -> None:
    engine = new_engine(qwen3, layout="solo")
    requests = streams(engine)
    read, failures = engine.batch.read, [0]

    def fails() -> Any:
        if failures[0] < 3 and len(engine.scheduler.running) > 1:
            failures[0] += 1
            raise RuntimeError("[metal] command buffer failed")
        return read()

    engine.batch.read = fails  # type: ignore[method-assign]
    layout = engine.batch.layout
    run(engine)
    assert failures[0] == 3
    assert engine.batch.layout is layout
    assert_as_alone(qwen3, *requests)


@pytest.mark.parametrize("ends", [False, True])
def test_a_mixed_pass_that_failed_once_does_not_fail_again(
    qwen3: TextModel, caplog: pytest.LogCaptureFixture, *, ends: bool
) -> None:
    """The only row has its next pass alone, so no chunk may share that pass."""
    model = Failing(qwen3)
    engine = new_engine(model, mixes=True, max_chunk=32)  # type: ignore[arg-type]
    requests = [*decoding(engine, 1), new_request(range(100, 300), max_tokens=9)]
    engine.submit(requests[1])
    step_until(engine, lambda: requests[1].prefilled_tokens >= 64)
    if ends:  # with the token that is read while the pass runs
        requests[0].max_tokens = len(output_of(requests[0]).tokens) + 1
    model.fails = First(1, lambda tokens, places: len(tokens) > 5)
    run(engine)
    assert ("(0 unfinished)" in caplog.text) == ends
    assert engine.batch.mixes
    assert_as_alone(qwen3, *requests)
