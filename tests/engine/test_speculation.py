"""Drafts in the engine: no request fails because of a drafter."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from equipped import equipped
from failing import Failing, First
from mlx_provider import LoadedModel, LoadOptions
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.row_cache import arrays
from mlx_provider.engine.speculation.policy import Ask, Asks, Policy
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.protocol.events import Failed
from mlx_provider.records import DeviceTokens, DraftRow
from mlx_provider.testing.driver import Eager, new_engine, new_request, output_of, run
from references import alone, assert_as_alone
from schedules import Oracle, steps_of
from stepping import step_until, submit
from tiny import build
from tolerances import logprob_tolerance

PROMPTS = [[(31 * i + 7 * j) % 300 + 20 for j in range(5 + 17 * i)] for i in range(5)]


def asked(**more: Any) -> list[Request]:
    return [new_request(tokens, max_tokens=24, **more) for tokens in PROMPTS]


def drafted(model: LoadedModel, drafting: Any, **more: Any) -> Engine:
    """An engine that drafts in every step, at any cost."""
    speculation = Speculation(Source(drafting), vocab=model.info.vocab_size, policy=Eager())
    return new_engine(model, mixes=True, speculation=speculation, **more)


def knowing(model: LoadedModel, requests: Sequence[Request], share: float = 0.8) -> Oracle:
    oracle = Oracle(share)
    for request in requests:
        for row in alone(model, request).rows:
            oracle.learn([*request.prompt.tokens, *row.tokens])
    return oracle


def serve(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        submit(engine, request, steps=1)
    run(engine)


class Raising:
    calls = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        self.calls += 1
        raise RuntimeError("no guess")


def test_no_request_fails_if_a_drafter_raises(qwen3: TextModel) -> None:
    drafting, requests = Raising(), asked()
    serve(drafted(qwen3, drafting), requests)
    assert_as_alone(qwen3, *requests)
    assert 0 < drafting.calls < 5  # after failures, it is not called for a while


@pytest.mark.parametrize(
    "guess",
    [
        pytest.param(lambda row: [-1, 2**40, 7], id="no tokens"),
        pytest.param(lambda row: [5] * 100, id="too many"),
        pytest.param(lambda row: [row.tokens[-1]] * row.wanted, id="wrong"),
        pytest.param(lambda row: np.array([383, 384, 385]), id="beyond the vocabulary"),
        pytest.param(lambda row: itertools.repeat(7), id="without end"),
        pytest.param(lambda row: [], id="none"),
        pytest.param(lambda row: DeviceTokens(mx.array([[-1, 2**30]] * 5)), id="no device tokens"),
        pytest.param(lambda row: DeviceTokens(mx.array([385.5, float("nan")])), id="no integers"),
    ],
)
def test_wrong_guesses_of_a_drafter_do_not_change_tokens(
    qwen3: TextModel, guess: Callable[[DraftRow], Any]
) -> None:
    class Lying:
        def propose(self, rows: Sequence[DraftRow]) -> list[Any]:
            return [guess(row) for row in rows]

    requests = asked()
    serve(drafted(qwen3, Lying()), requests)
    assert_as_alone(qwen3, *requests)


def test_guesses_for_other_rows_than_requested_are_ignored(qwen3: TextModel) -> None:
    class Short:
        def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
            return [[1]] * (len(rows) + 1)

    requests = asked()
    serve(drafted(qwen3, Short()), requests)
    assert_as_alone(qwen3, *requests)
    assert not any(request.drafted for request in requests)


def test_a_drafter_that_is_not_ready_for_a_row_is_asked_again_at_the_next_step(
    qwen3: TextModel,
) -> None:
    class Reading:
        calls = 0

        def propose(self, rows: Sequence[DraftRow]) -> list[list[int] | None]:
            self.calls += 1
            return [None] * len(rows)

    def calls_of(drafting: Reading) -> int:
        request = new_request(PROMPTS[1], max_tokens=24)
        speculation = Speculation(Source(drafting), vocab=qwen3.info.vocab_size)
        serve(new_engine(qwen3, speculation=speculation), [request])
        assert_as_alone(qwen3, request)
        return drafting.calls

    class Silent(Reading):
        def propose(self, rows: Sequence[DraftRow]) -> list[list[int] | None]:
            self.calls += 1
            return [[] for _ in rows]

    assert calls_of(Silent()) < 12 < calls_of(Reading())


class Noting(Oracle):
    """Knows the answer to one prompt, and counts the calls for each prompt."""

    def __init__(self, model: LoadedModel, known: Request) -> None:
        super().__init__(1.0)
        self.asked: Counter[int] = Counter()
        self.learn([*known.prompt.tokens, *output_of(alone(model, known)).tokens])

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        self.asked.update(row.tokens[0] for row in rows)
        return super().propose(rows)


def test_each_row_of_a_batch_uses_the_drafter_with_accepted_drafts(qwen3: TextModel) -> None:
    first, second = (new_request(PROMPTS[i], max_tokens=120) for i in (1, 3))
    knows_first, knows_second = Noting(qwen3, first), Noting(qwen3, second)
    speculation = Speculation(
        Source(knows_first), Source(knows_second), vocab=qwen3.info.vocab_size, clock=lambda: 0.0
    )
    engine = new_engine(qwen3, mixes=True, speculation=speculation, clock=lambda: 0.0)
    together = steps_of(engine, [first, second])
    assert_as_alone(qwen3, first, second)
    assert together < 60
    for request, able, other in (
        (first, knows_first, knows_second),
        (second, knows_second, knows_first),
    ):
        assert request.accepted > 80
        place = request.prompt.tokens[0]
        assert able.asked[place] > 2 * other.asked[place] > 0


def test_a_fault_of_one_drafter_leaves_the_rows_to_the_other(qwen3: TextModel) -> None:
    request = new_request(PROMPTS[1], max_tokens=60)
    failing, able = Raising(), Noting(qwen3, request)
    vocab = qwen3.info.vocab_size
    speculation = Speculation(Source(failing), Source(able), vocab=vocab, clock=lambda: 0.0)
    serve(new_engine(qwen3, speculation=speculation, clock=lambda: 0.0), [request])
    assert_as_alone(qwen3, request)
    assert 1 <= failing.calls <= 2
    assert request.accepted > 30


def test_nothing_is_drafted_while_a_prompt_is_prefilled(qwen3: TextModel) -> None:
    class Always(Policy):
        def choose(self, rows: Sequence[object], others: int, seconds: object) -> list[Asks]:
            return [(Ask(0, 2),)] * len(rows)

    first, newcomer = (new_request(PROMPTS[i], max_tokens=24) for i in (1, 4))
    vocab = qwen3.info.vocab_size
    speculation = Speculation(Source(knowing(qwen3, [first])), vocab=vocab, policy=Always())
    engine = new_engine(qwen3, mixes=True, speculation=speculation)
    engine.submit(first)
    step_until(engine, lambda: first.drafted)
    engine.submit(newcomer)
    engine.step()  # it reads the earlier drafts
    before = first.drafted
    while not newcomer.rows[0].tokens:
        engine.step()
        assert first.drafted == before
    run(engine)
    assert first.drafted > before
    assert_as_alone(qwen3, first, newcomer)


def test_a_chunk_whose_rows_end_before_its_pass_has_its_own(qwen3: TextModel) -> None:
    first, newcomer = (new_request(PROMPTS[i], max_tokens=8) for i in (1, 4))
    drafting, vocab = Source(knowing(qwen3, [first], share=1.0)), qwen3.info.vocab_size
    speculation = Speculation(drafting, vocab=vocab, policy=Always())
    engine = new_engine(qwen3, mixes=True, speculation=speculation)
    engine.submit(first)
    step_until(engine, lambda: len(first.rows[0].tokens) >= 4)
    serve(engine, [newcomer])
    assert_as_alone(qwen3, first, newcomer)
    prefilled = first.prefilled_tokens + newcomer.prefilled_tokens
    assert sum(step.chunk for step in engine.output.steps) == prefilled


def test_a_client_that_wants_no_drafts_has_none(qwen3: TextModel) -> None:
    requests = asked()
    requests[1].drafts = False
    serve(drafted(qwen3, knowing(qwen3, requests)), requests)
    assert_as_alone(qwen3, *requests)
    assert [request.drafted > 0 for request in requests] == [True, False, True, True, True]


def test_nothing_is_drafted_if_rows_decode_alone(qwen3: TextModel) -> None:
    requests = asked()
    serve(drafted(qwen3, knowing(qwen3, requests), layout="solo"), requests)
    assert_as_alone(qwen3, *requests)
    assert not any(request.drafted for request in requests)


def test_rows_that_wait_for_memory_continue_as_alone(qwen3: TextModel) -> None:
    requests = asked()
    room = [10_000]
    engine = drafted(qwen3, knowing(qwen3, requests), available=lambda: room[0], reserve=4)
    submit(engine, *requests, steps=12)
    room[0] = 260
    engine.step()
    assert engine.scheduler.queued_jobs
    run(engine)
    assert_as_alone(qwen3, *requests)


def test_a_pass_with_drafts_that_fails_is_run_again(qwen3: TextModel) -> None:
    requests, model = asked(), Failing(qwen3)
    engine = drafted(model, knowing(qwen3, requests))  # type: ignore[arg-type]
    submit(engine, *requests, steps=9)
    model.fails = once = First(1, lambda tokens, places: len(tokens) > 6)
    run(engine)
    assert not once.left
    assert_as_alone(qwen3, *requests)


def test_of_a_cancelled_row_with_drafts_the_accepted_tokens_are_stored(qwen3: TextModel) -> None:
    kept = PrefixCache(budget=lambda: 2**24)
    request = new_request(PROMPTS[3], max_tokens=60)
    engine = drafted(qwen3, knowing(qwen3, [request], share=0.6), prefix_cache=kept)
    engine.submit(request)
    step_until(engine, lambda: len(request.rows[0].tokens) >= 30)
    engine.cancel(request)
    run(engine)
    again = new_request([*PROMPTS[3], *request.rows[0].tokens, 7], max_tokens=9)
    run(engine, again)
    assert again.cached_tokens >= len(PROMPTS[3]) + 28
    assert_as_alone(qwen3, again)


def test_greedy_and_sampled_rows_have_the_logprobs_they_have_alone(qwen3: TextModel) -> None:
    requests = asked(logprobs=3)
    for i, request in enumerate(requests[1:]):
        request.params = SamplingParams(temperature=0.9, top_k=30, seed=i)
    serve(drafted(qwen3, knowing(qwen3, requests)), requests)
    for request in requests:
        mine, theirs = output_of(request), output_of(alone(qwen3, request))
        assert mine.tokens == theirs.tokens
        for own, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=logprob_tolerance())


# -- grammars


class Counting:
    """Allows the tokens that a rule names for each number of earlier tokens."""

    def __init__(self, rule: Callable[[int], set[int]], taken: int = 0) -> None:
        self.rule = rule
        self.taken = taken
        self.finished = False

    def mask(self) -> Any:
        words = np.zeros(12, np.uint32)
        for token in self.rule(self.taken):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def advance(self, token: int) -> None:
        assert token in self.rule(self.taken)
        self.taken += 1

    def forced_tokens(self) -> Sequence[int]:
        return ()

    def fork(self) -> Counting:
        return Counting(self.rule, self.taken)


def held(at: int) -> set[int]:
    return {40 + at % 7, 60 + at % 3, 90}


def test_drafts_keep_to_the_grammar(qwen3: TextModel) -> None:
    def constrained() -> list[Request]:
        requests = asked()
        for request in requests[::2]:
            request.rows[0].constraint = Counting(held)
        return requests

    plain, requests = constrained(), constrained()
    oracle = Oracle(0.7)
    for request in plain:
        engine = new_engine(qwen3, layout="solo")
        run(engine, request)
        oracle.learn([*request.prompt.tokens, *request.rows[0].tokens])
    serve(drafted(qwen3, oracle), requests)
    for request, other in zip(requests, plain, strict=True):
        assert output_of(request).tokens == output_of(other).tokens
        assert request.accepted > 0


def test_a_grammar_that_cannot_look_ahead_has_no_drafts(qwen3: TextModel) -> None:
    class Blind(Counting):
        def fork(self) -> Any:
            return None

    requests = asked()
    requests[0].rows[0].constraint = Blind(held)
    serve(drafted(qwen3, Oracle(1.0)), requests)
    assert requests[0].drafted == 0
    assert len(output_of(requests[0]).tokens) == 24


def test_a_grammar_that_fails_ahead_ends_its_request_alone(qwen3: TextModel) -> None:
    class Broken(Counting):
        def fork(self) -> Any:
            raise ValueError("no fork")

    requests = asked()
    oracle = knowing(qwen3, requests)
    requests[2].rows[0].constraint = Broken(lambda at: set(range(384)))
    serve(drafted(qwen3, oracle), requests)
    assert_as_alone(qwen3, *requests[:2], *requests[3:])
    assert any(isinstance(event, Failed) for event in requests[2].events.get(timeout=300))


def test_rows_whose_accepted_drafts_cannot_be_read_run_again(qwen3: TextModel) -> None:
    requests, failures = asked(), list[int]()
    engine = drafted(qwen3, knowing(qwen3, requests))
    read = engine.batch.catch_up

    def fails() -> Any:
        if engine.batch.drafted_rows and not failures:
            failures.append(len(engine.batch.drafted_rows))
            raise RuntimeError("[metal] command buffer failed")
        return read()

    vars(engine.batch)["catch_up"] = fails
    serve(engine, requests)
    assert failures
    assert_as_alone(qwen3, *requests)


def test_a_grammar_whose_forced_text_fails_changes_no_token(qwen3: TextModel) -> None:
    class Broken(Counting):
        def forced_tokens(self) -> Any:
            failures.append(self)
            raise ValueError("nothing forced")

    failures, requests = list[Any](), asked()
    oracle = knowing(qwen3, requests)
    requests[2].rows[0].constraint = Broken(lambda at: set(range(384)))
    serve(drafted(qwen3, oracle), requests)
    assert failures
    assert_as_alone(qwen3, *requests)


class Always(Eager):
    """Wants two drafts for every row in every step."""

    def choose(self, rows: Sequence[object], others: int, seconds: object) -> list[Asks]:
        return [(Ask(0, 2),)] * len(rows)


def test_a_drafter_with_states_drafts_in_every_pass(qwen3: TextModel) -> None:
    class Shown(Oracle):
        def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
            for row in rows:
                assert row.hidden is not None
                row.state = (row.state or 0) + row.fresh
                assert row.hidden.shape[0] == row.fresh > 0
                assert (
                    row.state == len(row.tokens) - 1
                )  # no state is missing, also none of the prompt
            return super().propose(rows)

    request = new_request(PROMPTS[1], max_tokens=32)
    drafting = Shown(1.0)
    drafting.learn([*PROMPTS[1], *output_of(alone(qwen3, request)).tokens])
    vocab = qwen3.info.vocab_size
    speculation = Speculation(Source(drafting, qwen3), vocab=vocab, policy=Always())
    serve(new_engine(qwen3, speculation=speculation), [request])
    assert_as_alone(qwen3, request)
    # the first token comes with the prompt, and the last one is not drafted
    assert request.accepted == request.drafted >= 2 * (32 - 2) // 3


# -- memory


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = build(tmp_path_factory.mktemp("tiny") / "hybrid", "qwen3_5_text")
    return equipped(load_text(folder, LoadOptions()))


def test_memory_grows_only_by_the_tokens_of_a_row(hybrid: TextModel) -> None:
    """States are recorded for one pass; those of rejected drafts are freed after it."""

    class Same:
        def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
            return [[row.tokens[-1]] * row.wanted for row in rows]

    request = new_request(PROMPTS[0], max_tokens=250)
    engine = drafted(hybrid, Same())
    engine.submit(request)

    def used_at(tokens: int) -> int:
        step_until(engine, lambda: len(request.rows[0].tokens) >= tokens)
        mx.synchronize()
        gc.collect()
        return mx.get_active_memory()

    early, late = used_at(50), used_at(200)
    row = engine.batch.extract(request.rows[0])
    assert late - early <= 1.3 * sum(array.nbytes for array in arrays(row))
    assert request.drafted > 120
    engine.cancel(request)


def test_a_state_is_stored_under_all_its_tokens_if_another_choice_fails(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of both choices are read before a pass, and the text of the first one raises."""
    model = equipped(load_text(build(tmp_path / "m", "rwkv7"), LoadOptions()))
    drafting = Speculation(Source(Raising()), vocab=model.info.vocab_size, policy=Eager())
    monkeypatch.setattr(drafting, "plan_drafts", lambda *given: ({}, True))
    cache = PrefixCache(budget=lambda: 2**30)
    engine = new_engine(model, speculation=drafting, prefix_cache=cache)
    request = new_request(range(30, 90), max_tokens=40, n=2)
    output_of(request).fails_at = 9
    serve(engine, [request])
    stored = [*request.prompt.tokens, *request.rows[1].tokens[:-1]]
    later = new_request([*stored, 7, 8], max_tokens=9)
    serve(engine, [later])
    assert_as_alone(model, later)
