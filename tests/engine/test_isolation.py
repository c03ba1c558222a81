"""A failure ends only the request that caused it."""

import asyncio
import builtins
import gc
import itertools
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import ParseError

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failing import Failing, First, decoding, fail_once
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.execution.sampler import draw
from mlx_provider.engine.prefix_cache.buffers import Lease
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Phase, Request
from mlx_provider.engine.scheduling.chunking import FixedShapes
from mlx_provider.families.text import TextModel
from mlx_provider.isolation import Isolation
from mlx_provider.protocol.events import Failed
from mlx_provider.testing.driver import TokenOutput, new_engine, new_request, output_of, run
from references import assert_as_alone
from stepping import step_until, submit

POISON = 77


def several(tokens: list[int], places: list[int]) -> bool:
    return len(tokens) > 1


def prompts(count: int) -> list[list[int]]:
    return [[30 + (17 * i + 7 * j) % 300 for j in range(6 + 9 * i)] for i in range(count)]


def start(engine: Engine, tokens: Sequence[list[int]], **more: Any) -> list[Request]:
    requests = [new_request(t, max_tokens=12, **more) for t in tokens]
    submit(engine, *requests)
    return requests


def error_of(request: Request) -> str:
    events = request.events.get(0)
    assert isinstance(events[-1], Failed)
    return events[-1].error.message


def test_a_prefill_that_fails_ends_its_request_alone(qwen3: TextModel) -> None:
    model = Failing(qwen3, fails_prefill=lambda tokens: POISON in tokens)
    engine = new_engine(model)  # type: ignore[arg-type]
    requests = start(engine, [*prompts(2), [40, POISON, 41]])
    run(engine)
    message = error_of(requests[2])
    assert "command buffer failed" in message
    assert message.endswith("set a lower MLX_PROVIDER_MEMORY_LIMIT")
    assert_as_alone(qwen3, requests[0])
    assert_as_alone(qwen3, requests[1])


def test_a_failed_batch_step_is_run_again_without_effect_on_results(qwen3: TextModel) -> None:
    once = First(1, several)
    engine = new_engine(Failing(qwen3, once))  # type: ignore[arg-type]
    requests = start(engine, prompts(4))
    run(engine)
    assert not once.left
    assert_as_alone(qwen3, *requests)
    assert engine.batch.layout.name == "grouped"


def test_a_row_is_run_again_if_the_other_rows_of_a_failed_step_have_ended(qwen3: TextModel) -> None:
    model = Failing(qwen3)
    engine = new_engine(model)  # type: ignore[arg-type]
    ending, staying = (
        new_request(t, max_tokens=n) for t, n in zip(prompts(2), (9, 20), strict=True)
    )
    submit(engine, ending, staying)
    step_until(engine, lambda: len(output_of(ending).tokens) >= 8)
    model.fails = once = First(1, several)
    run(engine)
    assert not once.left
    assert_as_alone(qwen3, staying)


def test_rows_decode_alone_after_batching_failed_again(qwen3: TextModel) -> None:
    engine = new_engine(Failing(qwen3, several))  # type: ignore[arg-type]
    requests = start(engine, prompts(4))
    run(engine)
    assert_as_alone(qwen3, *requests)
    assert engine.batch.layout.name == "solo"


@pytest.mark.parametrize("layout", ["grouped", "merged", "solo"])
def test_a_poisoned_row_fails_alone(qwen3: TextModel, layout: str) -> None:
    # the row with 100 prompt tokens fails from its 8th token; no other row gets that far
    model = Failing(qwen3, lambda tokens, places: max(places) >= 107)
    engine = new_engine(model, layout=layout)  # type: ignore[arg-type]
    requests = start(engine, [*prompts(4)[:3], [50] * 100])
    run(engine)
    assert "command buffer failed" in error_of(requests[3])
    assert_as_alone(qwen3, *requests[:3])
    assert engine.scheduler.idle


@pytest.mark.parametrize("part", "insert match acquire release save_prefill _forks".split())
def test_no_request_fails_if_the_prefix_cache_is_broken(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Not even one that waits for memory and has a second look-up."""

    def broken(*args: Any, **more: Any) -> None:
        raise ValueError("prefix_cache exploded")

    prefix_cache = PrefixCache(budget=lambda: 2**24)
    engine = new_engine(qwen3, prefix_cache=prefix_cache, available=lambda: 300, reserve=4)
    owner = prefix_cache if hasattr(prefix_cache, part) else engine.prefix_cache
    monkeypatch.setattr(owner, part, broken)
    requests = start(engine, [[60 + i] * 50 for i in range(2)])
    run(engine)
    requests += start(engine, [[60] * 50])
    run(engine)
    assert_as_alone(qwen3, *requests)


def test_a_reproducible_row_whose_sampling_keeps_failing_fails_alone(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(qwen3, fixed=FixedShapes(rows=3, tokens=16))
    requests = start(engine, prompts(3))

    def fails(logits: Any, rows: Any, masks: Any) -> Any:
        if rows[0].request is requests[1] and len(rows[0].tokens) >= 4:
            raise Odd("no sample")
        return draw(logits, rows, masks)

    monkeypatch.setattr("mlx_provider.engine.decode.draw", fails)
    run(engine)
    assert "its sampling failed: Odd: no sample" in error_of(requests[1])
    assert_as_alone(qwen3, requests[0], requests[2])


def test_a_reproducible_request_can_fail_by_two_choices_in_one_step(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(qwen3, fixed=FixedShapes(rows=3, tokens=16))
    both, other = new_request([30] * 20, max_tokens=40, n=2), new_request([50] * 9, max_tokens=9)
    submit(engine, both, other)
    first, failed = both.rows[0], list[bool]()

    def fails(logits: Any, rows: Any, masks: Any) -> Any:
        if rows[0] is first and len(first.tokens) == 4:
            failed.append(True)
        if rows[0].request is both and (rows[0] is first or len(failed) > 1) and failed:
            raise Odd("no sample")
        return draw(logits, rows, masks)

    monkeypatch.setattr("mlx_provider.engine.decode.draw", fails)
    run(engine)
    assert "its sampling failed" in error_of(both)
    assert len(failed) > 1
    assert_as_alone(qwen3, other)


@pytest.mark.parametrize("layout", ["grouped", "solo"])
def test_rows_whose_common_draw_fails_draw_alone(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    engine = new_engine(qwen3, layout=layout)
    requests, failed = start(engine, prompts(3)), list[int]()

    def fails(logits: Any, rows: Any, masks: Any) -> Any:
        if len(rows) > 1:
            failed.append(len(rows))
            raise Odd("no sample for several rows")
        return draw(logits, rows, masks)

    monkeypatch.setattr("mlx_provider.engine.decode.draw", fails)
    run(engine)
    assert_as_alone(qwen3, *requests)
    assert len(failed) == 2, "the second failure ends common draws"


@pytest.mark.parametrize("part", ["prompt", "row"])
def test_a_row_that_cannot_be_stored_loses_its_buffers(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    prefix_cache, released = PrefixCache(budget=lambda: 2**24), list[Any]()
    insert = prefix_cache.insert

    def fails(*args: Any, **more: Any) -> int:
        if ("awaited" in more) == (part == "row"):
            raise Odd("not stored")
        return insert(*args, **more)

    monkeypatch.setattr(prefix_cache, "insert", fails)
    monkeypatch.setattr(prefix_cache, "release", lambda lease, **more: released.append(lease))
    engine = new_engine(qwen3, prefix_cache=prefix_cache, layout="solo", max_chunk=64)
    left = new_request([50] * 300, max_tokens=3)
    submit(engine, left, steps=2)
    assert engine.scheduler.waiting[0].rows[0].lease is not None
    engine.cancel(left)
    whole = new_request([40] * 50, max_tokens=3)
    run(engine, whole)
    assert [lease.row is None for lease in released] == [part == "prompt", True]
    assert_as_alone(qwen3, whole)


def test_a_lease_that_cannot_be_acquired_costs_no_request(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(qwen3, prefix_cache=PrefixCache(budget=lambda: 2**24), layout="solo")
    run(engine, new_request([40] * 50, max_tokens=3))
    (again,) = start(engine, [[*[40] * 50, 41]])
    (job,) = engine.scheduler.waiting
    assert engine.prefix_cache is not None
    assert any(engine.prefix_cache.offers(job))
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "acquire", lambda lease: 1 / 0)
        engine.prefix_cache.lease(job)
    run(engine)
    assert_as_alone(qwen3, again)


def test_a_look_up_that_fails_late_leaves_no_prefix(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(qwen3, prefix_cache=PrefixCache(budget=lambda: 2**24))
    run(engine, new_request([40] * 50, max_tokens=3))
    monkeypatch.setattr(engine.prefix_cache, "_explain", lambda job, match: 1 / 0)
    again = new_request([*[40] * 40, *[41] * 10], max_tokens=3)
    run(engine, again)
    assert again.cached_tokens == 0
    assert_as_alone(qwen3, again)


@pytest.mark.parametrize(
    ("name", "layout"), [("zeros", "grouped"), ("eval", "grouped"), ("zeros", "merged")]
)
def test_a_copy_that_fails_as_a_row_leaves_costs_no_other_request(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    """The other rows share its cache, and its own stays in a prefix cache without room."""
    for at in itertools.count():
        budget = [2**24]
        prefix_cache = PrefixCache(budget=lambda budget=budget: budget[0])
        engine = new_engine(qwen3, prefix_cache=prefix_cache, layout=layout)
        requests = decoding(engine)
        budget[0] = 1
        with monkeypatch.context() as patch:
            failed = fail_once(patch, name, at)
            engine.cancel(requests[1])
            for _ in range(3):
                engine.step()
        run(engine)
        assert_as_alone(qwen3, requests[0], requests[2])
        assert engine.idle
        assert (prefix_cache.in_use, engine.batch.layout.groups) == (0, [])
        if not failed:
            break
    assert at > 1


def test_a_prompt_whose_storing_failed_is_no_entry_but_its_rows_keep_their_prefix(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = PrefixCache(budget=lambda: 2**24)
    engine = new_engine(qwen3, prefix_cache=kept, min_shared=16, layout="solo")
    first, second = ([*range(30, 94), end, 9] for end in (7, 8))
    (one,) = start(engine, [first])
    step_until(engine, lambda: engine.scheduler.running)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_provider.engine.prefix_cache.cache.prune", lambda leaf: 1 / 0)
        (two,) = start(engine, [second], n=2)
        step_until(engine, lambda: two.rows[1] in engine.scheduler.running)
    assert {row.lease.row for row in two.rows} == {None}
    assert {row.lease.base for row in two.rows} == {one.rows[0].lease.base}
    run(engine)
    assert_as_alone(qwen3, one, two)
    assert kept.in_use == 0


@pytest.mark.parametrize("name", ["contiguous", "eval"])
def test_a_prefix_that_cannot_be_copied_for_other_rows_changes_no_result(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for at in range(10):
        prefix_cache = PrefixCache(budget=lambda: 2**24)
        engine = new_engine(qwen3, prefix_cache=prefix_cache, min_shared=16)
        first, second = ([*range(30, 94), end, 9] for end in (7, 8))
        requests = start(engine, [first])
        while not engine.scheduler.running:
            engine.step()
        with monkeypatch.context() as patch:
            fail_once(patch, name, at)
            requests += start(engine, [second])
            engine.step()
        run(engine)
        failed = requests[1].rows[0].finish == "cancelled"  # in its own pass
        assert_as_alone(qwen3, *requests[: 1 if failed else 2])
        assert prefix_cache.in_use == 0


def test_the_buffers_of_a_row_that_ended_in_a_failed_pass_are_not_used_again(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(qwen3, prefix_cache=PrefixCache(budget=lambda: 2**24), layout="solo")
    ended, other = new_request([40] * 50, max_tokens=3), new_request([50] * 40, max_tokens=20)
    submit(engine, other, ended)
    step_until(engine, lambda: ended.phase is Phase.DONE)
    with monkeypatch.context() as patch:
        patch.setattr(engine.batch, "read", lambda: 1 / 0)
        engine.step()
    again = new_request([*[40] * 50, *output_of(ended).tokens, 7], max_tokens=3)
    run(engine, again)
    assert (again.cached_tokens, other.cached_tokens) == (0, 0)
    assert_as_alone(qwen3, ended, other, again)


def test_a_time_limit_ends_the_request_alone(qwen3: TextModel) -> None:
    now = [0.0]
    engine = new_engine(qwen3, clock=lambda: now[0])
    late = new_request(prompts(1)[0], max_tokens=20, deadline=5.0)
    engine.submit(late)
    (free,) = start(engine, prompts(2)[1:])
    for _ in range(4):
        engine.step()
    now[0] = 6.0
    run(engine)
    assert late.phase is Phase.DONE
    assert len(output_of(late).tokens) < 20
    assert_as_alone(qwen3, free)


def test_a_request_that_fails_as_one_row_is_cut_has_no_preempted_row(qwen3: TextModel) -> None:
    limit = 10**6
    prefixes = PrefixCache(budget=lambda: 2**24)
    engine = new_engine(qwen3, available=lambda: limit, reserve=4, prefix_cache=prefixes)
    vars(engine.scheduler.ledger).update(available_alone=lambda: 10**6)
    (other,) = start(engine, prompts(1))
    run(engine)
    request = new_request([41] * 60, max_tokens=80, n=2)
    engine.submit(request)
    step_until(engine, lambda: len(output_of(request).tokens) >= 9)
    cut, preempted = request.rows
    cut.output = Raising(part="finish")
    limit = 10
    record = engine.scheduler.schedule(0.0)
    assert record.to_end == [cut]
    assert record.to_preempt == [preempted]
    run(engine)
    assert "odd" in error_of(request)
    limit = 10**6
    (again,) = start(engine, prompts(1))
    run(engine)
    assert output_of(again).tokens == output_of(other).tokens


class Odd(Exception):
    """Represents an exception class of an unknown library."""


class Mute(Exception):
    """Has no readable message."""

    def __str__(self) -> str:
        raise ValueError("no message")


class Panic(BaseException):
    """Represents a panic of a library written in Rust."""


def exception_classes() -> list[type[BaseException]]:
    found = [c for c in vars(builtins).values() if isinstance(c, type)]
    kinds = [c for c in found if issubclass(c, BaseException)]
    kinds = [c for c in kinds if not issubclass(c, KeyboardInterrupt | BaseExceptionGroup)]
    return [*kinds, Odd, Mute, Panic, ParseError, jinja2.TemplateError, asyncio.CancelledError]


def raised(kind: type[BaseException]) -> BaseException:
    if issubclass(kind, UnicodeDecodeError):
        return kind("utf-8", b"x", 0, 1, "odd")
    if issubclass(kind, UnicodeEncodeError):
        return kind("utf-8", "x", 0, 1, "odd")
    if issubclass(kind, UnicodeTranslateError):
        return kind("x", 0, 1, "odd")
    return kind("odd")


@dataclass
class Raising(TokenOutput):
    """Output whose methods raise a given error at a given time."""

    part: str = ""
    error: Callable[[], BaseException] = lambda: ValueError("odd")

    def push(self, token: int, logprob: Any = None) -> Any:
        if self.part == "push" and len(self.tokens) == 2:
            raise self.error()
        super().push(token, logprob)
        return self.lazily() if self.part == "iterate" and len(self.tokens) == 2 else []

    def lazily(self) -> Any:
        raise self.error()
        yield

    def finish(self, reason: Any) -> Any:
        if self.part == "finish":
            raise self.error()
        if self.part == "iterate the end":
            return self.lazily(), reason
        return [], reason


@dataclass
class RaisingGrammar:
    part: str
    error: Callable[[], BaseException]
    finished: bool = False

    def mask(self) -> None:
        if self.part == "mask":
            raise self.error()

    def advance(self, token: int) -> None:
        if self.part == "advance":
            raise self.error()


PARTS = ("push", "iterate", "finish", "iterate the end", "mask", "advance")


@given(kind=st.sampled_from(exception_classes()), part=st.sampled_from(PARTS))
def test_any_exception_in_the_work_of_a_request_ends_only_that_request(
    qwen3: TextModel, kind: type[BaseException], part: str
) -> None:
    engine = new_engine(qwen3)
    requests = start(engine, prompts(2))
    row = requests[1].rows[0]
    row.output = Raising(part=part, error=lambda: raised(kind))
    row.constraint = RaisingGrammar(part, lambda: raised(kind))
    run(engine)
    message = error_of(requests[1])
    # Python converts a StopIteration of a generator to another error
    assert issubclass(kind, StopIteration) or kind.__name__ in message
    assert issubclass(kind, StopIteration) or "test_isolation, line" in message
    assert_as_alone(qwen3, requests[0])


def test_an_error_names_the_line_of_third_party_code() -> None:
    with Isolation() as tried:
        json.loads("{")
    assert tried.fault is not None
    assert tried.fault.summary.startswith("JSONDecodeError: Expecting property name")
    assert "test_isolation, line" in tried.fault.summary


def test_a_fault_keeps_no_object_of_the_block_alive() -> None:
    made: list[weakref.ref[Panic]] = []

    def fail() -> None:
        large = Panic()
        made.append(weakref.ref(large))
        try:
            json.loads("{")
        except ValueError as error:
            raise Odd("outer") from error

    gc.disable()
    try:
        with Isolation() as tried:
            fail()
        assert made[0]() is None
    finally:
        gc.enable()
    assert tried.fault is not None
    assert "JSONDecodeError" in tried.fault.trace


def test_isolation_does_not_catch_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), Isolation():
        raise KeyboardInterrupt


def test_a_prefill_that_starts_again_counts_as_one_look_up(qwen3: TextModel) -> None:
    stored = PrefixCache(budget=lambda: 2**30)
    engine, request = new_engine(qwen3, prefix_cache=stored), new_request([5] * 40, max_tokens=3)
    counted = list[tuple[str, int]]()
    vars(engine.output.recorder)["count"] = lambda name, n=1, label="": counted.append((name, n))
    submit(engine, request, steps=1)
    (job,) = engine.scheduler.waiting
    job.restart()
    step_until(engine, lambda: output_of(request).tokens)
    engine.store(request, request.rows)
    engine.drop_rows(request.rows)
    engine.scheduler.preempt_row(request.rows[0])
    run(engine)
    assert len(output_of(request).tokens) == 3
    report = stored.report()
    assert (report["lookups"], report["prompt_tokens"]) == (1, 40)
    assert sum(n for name, n in counted if name == "prompt_tokens_cached") == 0
