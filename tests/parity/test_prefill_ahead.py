"""The beginning of a future prompt is prefilled, without delay of other requests."""

from collections.abc import Callable
from typing import Any

import pytest

from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.worker import EngineWorker
from mlx_provider.families.text import TextModel
from mlx_provider.testing.driver import new_engine, new_request, run
from references import assert_as_alone, assert_near_alone

Tiny = Callable[..., TextModel]

STORED = [30 + i % 300 for i in range(400)]
"""A prompt that an earlier request has left in the prefix cache."""
HEAD = [*STORED, *(31 + i * 7 % 300 for i in range(160))]
PROMPT = [*HEAD, *(40 + i for i in range(30))]
KINDS = ("qwen3", "gemma3_text", "qwen3_5_text")
"""Layers that can be cut at any token, windows, and states."""


def engine_of(model: TextModel, **more: Any) -> Engine:
    engine = new_engine(model, prefix_cache=PrefixCache(budget=lambda: 2**26), **more)
    run(engine, new_request(STORED, max_tokens=1))
    return engine


def ask(engine: Engine, **more: Any) -> Any:
    request = new_request(PROMPT, logprobs=1, **more)
    run(engine, request)
    return request


@pytest.mark.parametrize("family", KINDS)
def test_a_prompt_computes_only_its_tokens_after_the_prefilled_ones(
    tiny: Tiny, family: str
) -> None:
    model = tiny(family)
    engine = engine_of(model)
    before = engine.prefix_cache.cache.report()  # type: ignore[union-attr]
    engine.prefill_in_background(new_request(HEAD, max_tokens=0))
    assert run(engine) == []
    counted = engine.prefix_cache.cache.report()  # type: ignore[union-attr]
    assert counted["lookups"] == before["lookups"], "no client has asked"
    assert engine.output.background_tokens >= len(HEAD) - len(STORED)
    request = ask(engine)
    assert request.cached_tokens == len(HEAD)
    assert_near_alone(model, request)


@pytest.mark.parametrize("family", KINDS)
def test_an_arriving_request_ends_a_background_prefill_soon(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    engine = engine_of(model, max_chunk=64)
    engine.prefill_in_background(new_request(HEAD, max_tokens=0))
    engine.step()
    done = engine.output.background_tokens
    assert 0 < done < len(HEAD) - len(STORED)
    assert (engine.scheduler.queued_jobs, engine.scheduler.active_rows) == ([], 0)
    assert engine.scheduler.live_bytes == 0
    request = ask(engine)
    assert engine.output.background_tokens == done
    assert request.cached_tokens > len(STORED), "what was computed helps"
    assert_as_alone(model, request)


def test_another_tenant_cannot_reuse_a_background_prefill(tiny: Tiny) -> None:
    engine = engine_of(tiny("qwen3"))
    engine.prefill_in_background(new_request(HEAD, max_tokens=0))
    run(engine)
    assert engine.output.background_tokens
    assert ask(engine, salt="other").cached_tokens == 0


def test_a_future_prompt_needs_memory_that_nothing_uses(tiny: Tiny) -> None:
    engine = engine_of(tiny("qwen3"), available=lambda: 2 * len(PROMPT))
    engine.prefill_in_background(new_request(HEAD, max_tokens=0))
    assert engine.idle, "the prefixes hold that memory"
    request = ask(engine)
    assert request.cached_tokens == len(STORED)


def test_a_prompt_without_a_stored_beginning_or_without_new_tokens_is_not_computed(
    tiny: Tiny,
) -> None:
    engine = engine_of(tiny("qwen3"))
    for tokens in ([*STORED, 7, 8, 9], [9] * 400, [*STORED[:100], *[9] * 300]):
        engine.prefill_in_background(new_request(tokens, max_tokens=0))
        assert engine.idle
    assert engine.output.background_tokens == 0


def test_work_of_another_engine_ends_a_background_prefill(tiny: Tiny) -> None:
    worker = EngineWorker(lambda posts: None, lambda error: None)
    engine, other = engine_of(tiny("qwen3")), engine_of(tiny("qwen3"))

    def begin() -> None:
        worker.add(engine)
        worker.add(other)
        engine.prefill_in_background(new_request(HEAD, max_tokens=0))
        assert not engine.idle
        other.submit(new_request(PROMPT, max_tokens=2))

    worker.call(begin).result(timeout=300)
    while not worker.call(lambda: other.idle).result(timeout=300):
        pass
    assert worker.call(lambda: (engine.idle, engine.output.background_tokens)).result(
        timeout=300
    ) == (True, 0)
    worker.close()
