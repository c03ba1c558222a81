"""A cancelled request frees its row and its memory within one step, in each phase."""

import logging
import random

import mlx.core as mx
import pytest

from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Phase, SamplingParams
from mlx_provider.families.text import TextModel
from mlx_provider.testing.driver import new_engine, new_request, run
from references import assert_as_alone
from stepping import step_until, submit


def test_cancel_while_queued_in_prefill_and_in_decode(
    qwen3: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = new_engine(qwen3, max_chunk=16, max_rows=2)
    decoding = new_request([30] * 5, max_tokens=50)
    prefilling = new_request([31] * 200, max_tokens=5)
    queued = new_request([32] * 300, max_tokens=5)
    assert len({new_request(queued.prompt).id for _ in range(2)}) == 2
    submit(engine, decoding, prefilling, queued, steps=4)
    phases = [decoding.phase, prefilling.phase, queued.phase]
    assert phases == [Phase.DECODE, Phase.PREFILL, Phase.WAITING]
    for request in (decoding, prefilling, queued):
        engine.cancel(request)
        assert request.phase is Phase.DONE
    assert not engine.idle, "their readers are still to be told"
    assert {request for request, _ in engine.step()} == {decoding, prefilling, queued}
    assert engine.idle
    assert engine.batch.layout.passes() == []
    lines = [record.message for record in caplog.records]
    assert "prefill 5 new" in lines[0]
    assert f"prefill {prefilling.prefilled_tokens} of 200 new" in lines[1]
    assert 0 < prefilling.prefilled_tokens < 200
    assert "prefill 0 of 300 new" in lines[2]
    assert ["no token" in line for line in lines] == [False, True, True]


def test_cancel_of_one_choice_holder_ends_every_choice(qwen3: TextModel) -> None:
    engine = new_engine(qwen3)
    several = new_request([30] * 5, max_tokens=50, n=3)
    other = new_request([33] * 9, max_tokens=20)
    submit(engine, several, other, steps=6)
    engine.cancel(several)
    run(engine)
    assert_as_alone(qwen3, other)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.sweep)])
def test_many_mixed_requests_leave_no_memory_behind(qwen3: TextModel, count: int) -> None:
    rng = random.Random(0)
    engine = new_engine(qwen3, max_chunk=64, max_rows=16)
    waiting = [
        new_request(
            [rng.randrange(20, 380) for _ in range(rng.choice([1, 5, 20, 60]))],
            max_tokens=rng.randint(1, 12),
            n=rng.choice([1, 1, 1, 2]),
            params=rng.choice([SamplingParams(temperature=0), SamplingParams(top_p=0.9, seed=3)]),
        )
        for _ in range(count)
    ]
    requests = list(waiting)
    doomed = rng.sample(requests, count // 5)
    after_50 = 0
    while waiting or not engine.idle:
        for request in waiting[: rng.randint(0, 4)]:
            engine.submit(request)
            waiting.remove(request)
        engine.step()
        if doomed and rng.random() < 0.3:
            engine.cancel(doomed.pop())
        if not after_50 and sum(r.phase is Phase.DONE for r in requests) >= 50:
            mx.clear_cache()
            after_50 = mx.get_active_memory()
    assert not engine.scheduler.queued_jobs
    assert engine.scheduler.active_rows == 0
    mx.clear_cache()
    assert mx.get_active_memory() <= after_50


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_of_a_row_that_leaves_right_after_it_joined_the_cached_tokens_are_stored(
    qwen3: TextModel, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine(qwen3, prefix_cache=PrefixCache(budget=lambda: 2**24))
    tokens = [30 + i % 300 for i in range(100)]
    first = new_request(tokens, max_tokens=20)
    engine.submit(first)
    reply = first.rows[0].tokens
    step_until(engine, lambda: len(reply) >= steps)
    engine.cancel(first)
    again = new_request([*tokens, *reply, 5, 6], max_tokens=5)
    run(engine, again)
    assert again.cached_tokens == len(tokens) + (steps if steps > 1 else 0)
    assert_as_alone(qwen3, again)
    assert not caplog.records
