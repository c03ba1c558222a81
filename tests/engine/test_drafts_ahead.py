"""Passes with drafts that are launched before the result of the previous pass is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from device_reads import DeviceReads
from equipped import equipped
from mlx_provider import LoadOptions
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.speculation.costs import Ask, Asks
from mlx_provider.engine.speculation.policy import Policy
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import DraftRow, Unread
from mlx_provider.testing.driver import Eager, new_engine, new_request, output_of, run
from references import alone
from schedules import Oracle
from tiny import build

PROMPTS = [[(31 * i + 7 * j) % 300 + 20 for j in range(5 + 17 * i)] for i in range(5)]
KINDS = {
    "attention": ("qwen3", {}),
    "hybrid": ("qwen3_5_text", {}),
    "hybrid of another make": ("nemotron_h", {}),
    "windows": ("gemma3_text", {}),
    "windows, bfloat16": ("gemma3_text", {"dtype": "bfloat16"}),
    "windows, 4 bit": ("gemma3_text", {"bits": 4}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}),
}
DEFAULT = ("hybrid", "windows, bfloat16")
"""The others are left to the sweep: `tests/parity` has schedules for their caches."""
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, top_k=30, seed=1),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, seed=2),
    SamplingParams(temperature=0, logit_bias=((40, 3.0),)),
    SamplingParams(temperature=1.2, top_p=0.9, seed=3),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextModel]:
    known: dict[str, TextModel] = {}

    def get(kind: str) -> TextModel:
        if kind not in known:
            family, more = KINDS[kind]
            folder = build(tmp_path_factory.mktemp("tiny") / family, family, **more)
            known[kind] = equipped(load_text(folder, LoadOptions()))
        return known[kind]

    return get


def asked(**more: Any) -> list[Request]:
    pairs = zip(PROMPTS, MIXED, strict=True)
    return [new_request(tokens, max_tokens=24, params=params, **more) for tokens, params in pairs]


def knowing(model: TextModel, requests: Sequence[Request], share: float) -> Oracle:
    oracle = Oracle(share, ahead=True)
    for request in requests:
        for row in alone(model, request).rows:
            oracle.learn([*request.prompt.tokens, *row.tokens])
    return oracle


def drafted(model: TextModel, drafting: Any, **more: Any) -> Engine:
    speculation = Speculation(Source(drafting), vocab=model.info.vocab_size, policy=Eager())
    return new_engine(model, mixes=True, speculation=speculation, **more)


def assert_as_alone(model: TextModel, requests: Sequence[Request]) -> None:
    for request in requests:
        for row, other in zip(request.rows, alone(model, request).rows, strict=True):
            assert row.tokens == other.tokens[: len(row.tokens)]
            assert len(row.tokens) == len(other.tokens) or row.finish == "cancelled"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in DEFAULT else pytest.mark.sweep) for k in KINDS],
)
def test_rows_that_come_and_go_have_the_tokens_they_have_alone(
    models: Callable[[str], TextModel], kind: str
) -> None:
    """Rows: greedy, sampled, with penalties, with several choices, cancelled, preempted."""
    model = models(kind)
    requests = [*asked(), *asked(n=2)[1:2], *asked(stop_tokens=frozenset(range(40, 60)))[:2]]
    room = [10_000]
    kept = PrefixCache(budget=lambda: 2**24)
    oracle = knowing(model, requests, 0.8)
    engine = drafted(model, oracle, prefix_cache=kept, reserve=4, available=lambda: room[0])
    with DeviceReads(engine) as reads:
        for at, request in enumerate(requests):
            engine.submit(request)
            for _ in range(3):
                engine.step()
            if at == 2:
                engine.cancel(request)
        room[0] = 260
        engine.step()
        assert engine.scheduler.queued
        room[0] = 10_000
        run(engine)
    assert_as_alone(model, requests)
    assert sum(request.accepted for request in requests) > 40
    assert reads.ahead > 3
    kept.check_integrity()
    again = [new_request([*r.prompt.tokens, *r.rows[0].tokens, 7], max_tokens=6) for r in requests]
    for request in again:
        engine.submit(request)
    run(engine)
    assert_as_alone(model, again)
    assert sum(request.cached for request in again) > 150


def test_logprobs_are_those_of_rows_alone(models: Callable[[str], TextModel]) -> None:
    model = models("hybrid")
    requests = asked(logprobs=2)
    engine = drafted(model, knowing(model, requests, 0.8))
    for request in requests:
        engine.submit(request)
    run(engine)
    for request in requests:
        mine, theirs = output_of(request), output_of(alone(model, request))
        assert mine.tokens == theirs.tokens
        for own, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(("kind", "accepted"), [("attention", 1), ("hybrid", 2), ("hybrid", 3)])
def test_of_a_row_that_ends_within_an_unread_result_all_computed_tokens_are_stored(
    models: Callable[[str], TextModel], kind: str, accepted: int
) -> None:
    model = models(kind)
    request = new_request(PROMPTS[3], max_tokens=10 + accepted)
    kept = PrefixCache(budget=lambda: 2**24)
    engine = drafted(
        model,
        knowing(model, [new_request(PROMPTS[3], max_tokens=60)], 1.0),
        prefix_cache=kept,
    )
    engine.submit(request)
    run(engine)
    assert_as_alone(model, [request])
    again = new_request([*PROMPTS[3], *request.rows[0].tokens, 7], max_tokens=9)
    engine.submit(again)
    run(engine)
    assert again.cached >= len(PROMPTS[3]) + 8 + accepted
    assert_as_alone(model, [again])


def test_no_request_fails_if_a_drafter_fails_ahead(
    models: Callable[[str], TextModel],
) -> None:
    class Failing(Oracle):
        calls = 0

        def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
            self.calls += 1
            if self.calls % 4 == 0:
                raise RuntimeError("no guess")
            return super().propose(rows)

    model, requests = models("hybrid"), asked()
    oracle = Failing(0.8, ahead=True)
    oracle._known = knowing(model, requests, 1.0)._known
    engine = drafted(model, oracle)
    for request in requests:
        engine.submit(request)
    run(engine)
    assert oracle.calls >= 4
    assert_as_alone(model, requests)


def test_a_pass_that_fails_ahead_is_run_again(models: Callable[[str], TextModel]) -> None:
    model, requests = models("hybrid"), asked()

    class Failing:
        countdown = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def decode(self, tokens: mx.array, *args: Any) -> mx.array:
            logits = model.decode(tokens, *args)
            if tokens.size > 6:
                self.countdown -= 1
                if self.countdown == 0:
                    raise RuntimeError("[metal] command buffer failed")
            return logits

    failing = Failing()
    engine = drafted(failing, knowing(model, requests, 0.8))  # type: ignore[arg-type]
    for request in requests:
        engine.submit(request)
    for _ in range(9):
        engine.step()
    failing.countdown = 2
    run(engine)
    assert failing.countdown < 0
    assert_as_alone(model, requests)


class Checking(Oracle):
    """Counts wrong results among those that it gets, and results of passes without drafts."""

    def __init__(self) -> None:
        super().__init__(0.7, ahead=True)
        self.wrong = self.without_drafts = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        for row in rows:
            before: Unread | None = row.state
            if before is not None:
                self.wrong += before.read != before.held.item()
                self.without_drafts += before.tokens.size == 1
            row.state = row.unread
        return super().propose(rows)


class Alternating(Policy):
    """Three drafts for each row in two steps of four."""

    steps = 0

    def wanted(self, rows: Sequence[object], others: int, seconds: object) -> list[Asks]:
        self.steps += 1
        return [(Ask(0, 3),) if (self.steps + at) % 4 < 2 else () for at in range(len(rows))]


def test_a_drafter_gets_the_accepted_tokens_before_its_next_guesses(
    models: Callable[[str], TextModel],
) -> None:
    model, requests = models("bfloat16"), asked()
    drafting = Checking()
    for request in requests:
        drafting.learn([*request.prompt.tokens, *alone(model, request).rows[0].tokens])
    speculation = Speculation(Source(drafting), vocab=model.info.vocab_size, policy=Alternating())
    engine = new_engine(model, speculation=speculation)
    for request in requests:
        engine.submit(request)
    run(engine)
    assert drafting.without_drafts > 4
    assert drafting.wrong == 0
