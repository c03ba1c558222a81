"""Both drafters in the engine: nobody's tokens change, and what can be foreseen is."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_provider import LoadOptions
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import Drafting
from mlx_provider.testing.driver import Eager, new_engine, new_request, output_of, run
from mlx_provider_drafters.draft_model import DraftModel
from mlx_provider_drafters.lookup import Lookup
from reciting import Reciting
from references import alone
from schedules import steps_of
from stepping import step_until, submit
from tolerances import logprob_tolerance

VOCAB = 384
FILE = [20 + (i * i * 31 + i // 7) % 300 for i in range(150)]
REWRITTEN = [*FILE[:40], 350, 351, *FILE[40:100], *FILE[104:]]
TEXT = [*FILE, 352, 353, *REWRITTEN, *range(20, 320)]
SENT = len(FILE) + 2
"""Tokens of the text that are the prompt of whoever has the whole file rewritten."""


@pytest.fixture(scope="module")
def reciting(qwen3: TextModel) -> Any:
    return Reciting(qwen3, TEXT)


@pytest.fixture(params=["lookup", "same model", "other model"])
def drafting(
    request: pytest.FixtureRequest, qwen3: TextModel, folder: Callable[..., Path]
) -> Drafting:
    if request.param == "lookup":
        return Lookup()
    other = load_text(folder("qwen3", seed=4, num_hidden_layers=2), LoadOptions())
    return DraftModel(qwen3 if request.param == "same model" else other, VOCAB)


def drafted(model: Any, drafting: Drafting, *, eager: bool = True, **more: Any) -> Engine:
    """An engine that drafts, `eager`ly or where it pays by the costs that are assumed, for no
    time passes."""
    policy = Eager() if eager else None
    speculation = Speculation(Source(drafting), vocab=VOCAB, policy=policy, clock=lambda: 0.0)
    return new_engine(model, mixes=True, speculation=speculation, clock=lambda: 0.0, **more)


def asked(lengths: Sequence[int], **more: Any) -> list[Request]:
    return [new_request(TEXT[:length], max_tokens=24, **more) for length in lengths]


def assert_as_alone(model: Any, requests: Sequence[Request]) -> None:
    for request in requests:
        for row, other in zip(request.rows, alone(model, request).rows, strict=True):
            assert row.tokens == other.tokens[: len(row.tokens)]
            assert len(row.tokens) == len(other.tokens) or row.finish == "cancelled"


def decode(engine: Engine, request: Request, tokens: int) -> None:
    step_until(engine, lambda: len(request.rows[0].tokens) >= tokens)


def test_a_row_with_drafts_gets_tokens_of_plain_decoding(reciting: Any, drafting: Drafting) -> None:
    requests = asked([SENT + 7])
    engine = drafted(reciting, drafting)
    run(engine, requests[0])
    assert_as_alone(reciting, requests)
    assert requests[0].drafted > 0


@pytest.mark.parametrize("drafting", ["lookup", "other model"], indirect=True)
def test_joining_and_leaving_rows_get_their_plain_tokens(reciting: Any, drafting: Drafting) -> None:
    """Staggered, sampled, of several choices, cancelled, preempted, found in the prefix cache."""
    sampled = SamplingParams(temperature=1.2, top_p=0.95, seed=3)
    requests = asked([SENT, 12, SENT + 60, 1])
    requests += asked([SENT + 20], params=sampled, logprobs=2)
    requests += asked([SENT + 33], params=sampled, n=2)
    requests += asked([SENT], logprobs=1)
    room = [2**40]
    kept = PrefixCache(budget=lambda: 2**24)
    engine = drafted(
        reciting, drafting, prefix_cache=kept, max_chunk=64, reserve=4, available=lambda: room[0]
    )
    for request in requests:
        submit(engine, request, steps=3)
        if request is requests[2]:
            decode(engine, request, 4)
            engine.cancel(request)
    decode(engine, requests[6], 4)
    room[0] = 400
    engine.step()
    assert engine.scheduler.queued_jobs
    room[0] = 2**40
    run(engine)
    again = asked([SENT, SENT + 60])
    run(engine, *again)
    assert all(request.cached_tokens > SENT - 2 for request in again)
    assert requests[2].rows[0].finish == "cancelled"
    assert_as_alone(reciting, [*requests, *again])
    assert sum(request.drafted for request in requests) > 30
    for request in (requests[4], requests[6]):
        pairs = zip(
            output_of(request).logprobs, output_of(alone(reciting, request)).logprobs, strict=True
        )
        for own, other in pairs:
            assert own.logprob == pytest.approx(other.logprob, abs=logprob_tolerance())


@pytest.mark.parametrize("drafting", ["lookup", "same model"], indirect=True)
def test_six_rows_with_drafts_get_their_plain_tokens(reciting: Any, drafting: Drafting) -> None:
    requests = asked([SENT + 9 * i for i in range(6)])
    engine = drafted(reciting, drafting)
    run(engine, *requests)
    assert_as_alone(reciting, requests)
    assert all(request.drafted for request in requests)


def steps(engine: Engine, requests: Sequence[Request]) -> int:
    submit(engine, *requests)
    step_until(engine, lambda: not (engine.scheduler.waiting or engine.scheduler.queued_jobs))
    return steps_of(engine, [])


def test_lookup_halves_the_steps_of_a_rewritten_file(reciting: Any) -> None:
    request = new_request(TEXT[:SENT], max_tokens=len(REWRITTEN))
    taken = steps(drafted(reciting, Lookup(), eager=False), [request])
    assert request.rows[0].tokens == REWRITTEN
    assert taken <= len(REWRITTEN) / 2
    assert request.accepted > 0.8 * request.drafted


def test_text_without_repetition_gets_hardly_any_lookup_drafts(qwen3: TextModel) -> None:
    request = new_request(TEXT[40:90], max_tokens=100)
    run_through = steps(drafted(qwen3, Lookup(), eager=False), [request])
    assert run_through <= 102
    assert request.drafted < 10
    assert_as_alone(qwen3, [request])


def test_drafts_of_an_identical_model_are_nearly_always_accepted(qwen3: TextModel) -> None:
    requests = [new_request(FILE[: 3 + 20 * i], max_tokens=32) for i in range(5)]
    taken = steps(drafted(qwen3, DraftModel(qwen3, VOCAB), eager=False), requests)
    assert_as_alone(qwen3, requests)
    drafts = sum(request.drafted for request in requests)
    assert sum(request.accepted for request in requests) > 0.97 * drafts > 70
    assert taken < 25


def test_the_draft_memory_of_a_row_is_free_when_the_row_ends(qwen3: TextModel) -> None:
    drafting = DraftModel(qwen3, VOCAB, context=512, kv_bytes=1)
    engine = drafted(qwen3, drafting)
    for tokens in (FILE[:9], FILE[:12]):
        request = new_request(tokens, max_tokens=9)
        run(engine, request)
        assert request.drafted > 0
