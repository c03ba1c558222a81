"""Chunks of a long prompt share passes with decoding rows; no tokens change."""

import weakref
from typing import Any

import mlx.core as mx
import pytest

from failing import Failing, First, decoding
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.execution.sampler import draw
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Phase
from mlx_provider.families.text import TextModel
from mlx_provider.protocol.events import Failed
from mlx_provider.serving.probe import probe
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from references import assert_as_alone
from stepping import step_until

POISON = 383
"""A token that nobody draws: beyond the tokenizer's."""
LONG = [100 + 3 * i % 250 for i in range(200)]


def engine_of(model: Any, **more: Any) -> Engine:
    return new_engine(model, mixes=True, max_chunk=32, **more)


def test_a_long_prompt_has_few_passes_of_its_own(qwen3: TextModel) -> None:
    model = Failing(qwen3)
    engine = engine_of(model)
    others = decoding(engine)
    model.prefills.clear()
    model.decodes.clear()
    long = new_request(LONG, max_tokens=9, n=2)
    run(engine, long)
    assert not model.prefills
    assert sum(n - 3 for n in model.decodes if n > 5) == len(LONG)
    assert_as_alone(qwen3, *others, long)


def test_a_prompt_with_mixed_chunks_is_stored_in_the_prefix_cache(qwen3: TextModel) -> None:
    prefix_cache = PrefixCache(budget=lambda: 2**24)
    engine = engine_of(qwen3, prefix_cache=prefix_cache)
    decoding(engine)
    first, again = (new_request(LONG, max_tokens=4) for _ in range(2))
    run(engine, first)
    run(engine, again)
    assert again.cached_tokens == len(LONG) - 1
    assert_as_alone(qwen3, again)


def test_a_prompt_that_gets_no_cache_fails_alone(qwen3: TextModel) -> None:
    full = False

    def make_cache() -> list[Any]:
        if full:
            raise MemoryError("no cache")
        return qwen3.make_cache()

    engine = engine_of(qwen3, make_cache=make_cache)
    others = decoding(engine)
    for _ in range(10):  # the rows owe no time to a chunk
        engine.step()
    full, long = True, new_request(LONG, max_tokens=9)
    run(engine, long)
    assert isinstance(long.events.get(0)[-1], Failed)
    assert_as_alone(qwen3, *others)


def test_a_cancelled_prompt_leaves_no_cache_behind(qwen3: TextModel) -> None:
    """The record of passes that can have caused an error outlives these passes."""
    engine = engine_of(qwen3)
    others = decoding(engine)
    long = new_request(LONG, max_tokens=9)
    engine.submit(long)
    step_until(engine, lambda: long.prefilled_tokens)
    (job,) = engine.scheduler.waiting
    left = weakref.ref(job.row_cache()[0])
    del job
    for request in (long, *others):
        engine.cancel(request)
    engine.step()
    assert engine.idle
    assert left() is None


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("done", [1, len(LONG) - 30])
def test_a_draw_that_fails_in_a_mixed_pass_is_repeated(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch, done: int, stored: bool
) -> None:
    """Also with the last chunk of a prompt, whose prefill starts again."""
    prefix_cache = PrefixCache(budget=lambda: 2**24) if stored else None
    engine = engine_of(qwen3, prefix_cache=prefix_cache)
    others = decoding(engine)
    long = new_request(LONG, max_tokens=9)
    failures: list[int] = []

    def fails(logits: mx.array, rows: Any, masks: Any) -> Any:
        if len(rows) == len(others) and long.prefilled_tokens >= done and not failures:
            failures.append(long.prefilled_tokens)
            raise RuntimeError("[metal::malloc] out of memory")
        return draw(logits, rows, masks)

    monkeypatch.setattr("mlx_provider.engine.decode.draw", fails)
    run(engine, long)
    assert failures
    assert_as_alone(qwen3, *others, long)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_failed_mixed_pass_is_run_again_without_effect_on_results(
    qwen3: TextModel, rows: int
) -> None:
    once = First(1, lambda tokens, places: len(tokens) > 5)
    engine = engine_of(Failing(qwen3, once))
    others = decoding(engine, rows)
    long = new_request(LONG, max_tokens=9)
    run(engine, long)
    assert not once.left
    assert_as_alone(qwen3, *others, long)
    assert engine.batch.layout.name == "grouped"


def test_no_chunk_is_mixed_when_rows_decode_alone(qwen3: TextModel) -> None:
    engine = engine_of(Failing(qwen3, lambda tokens, places: len(tokens) > 1))
    others = decoding(engine)
    step_until(engine, lambda: engine.batch.layout.name == "solo")
    long = new_request(LONG, max_tokens=9)
    engine.submit(long)
    step_until(engine, lambda: output_of(long).tokens)
    assert all(other.phase is Phase.DECODE for other in others), "it waits for nobody's end"
    run(engine)
    assert_as_alone(qwen3, *others, long)


def test_an_error_one_step_later_is_first_attributed_to_the_chunk(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Failing(qwen3)
    engine = engine_of(model)
    others = decoding(engine)
    read, failures = engine.batch.read, [0]

    def fails() -> Any:
        if model.decodes[-1] > 5 and failures[0] < 2:
            failures[0] += 1
            raise RuntimeError("[metal] command buffer failed")
        return read()

    monkeypatch.setattr(engine.batch, "read", fails)
    long = new_request(LONG, max_tokens=9)
    run(engine, long)
    assert failures[0] == 2
    assert_as_alone(qwen3, *others, long)
    assert engine.batch.layout.name == "grouped"


@pytest.mark.parametrize("at", [100, 199])
def test_a_chunk_that_always_fails_ends_its_request_alone(qwen3: TextModel, at: int) -> None:
    model = Failing(qwen3, lambda tokens, places: POISON in tokens, lambda tokens: POISON in tokens)
    engine = engine_of(model)
    others = decoding(engine)
    poisoned = new_request([POISON if i == at else t for i, t in enumerate(LONG)], max_tokens=9)
    run(engine, poisoned)
    events = poisoned.events.get(0)
    assert isinstance(events[-1], Failed)
    assert "command buffer failed" in events[-1].error.message
    assert_as_alone(qwen3, *others)
    assert engine.batch.layout.name == "grouped"
    (after,) = decoding(engine, 1)
    run(engine)
    assert_as_alone(qwen3, after)


def test_the_probe_permits_mixed_passes_only_if_they_are_exact(qwen3: TextModel) -> None:
    class Wrong(Failing):
        def decode(self, tokens: mx.array, *given: Any) -> mx.array:
            logits = self.inner.decode(tokens, *given)
            return logits + mx.arange(logits.shape[1]) * 0.01 if tokens.size > 5 else logits

    found = probe(Wrong(qwen3), qwen3.make_cache, ("grouped", "merged", "solo"))  # type: ignore[arg-type]
    assert (found.layout, found.mixes) == ("grouped", False)
    assert "passes of their own" in found.notes[0]
    assert probe(qwen3, qwen3.make_cache, qwen3.kv_layouts).mixes
