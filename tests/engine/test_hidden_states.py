"""A drafter that asks for hidden states gets those of each of its tokens."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from failing import decoding, fail_once
from mlx_provider import LoadedModel, PrefillChunk, Prompt
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.speculation.speculation import KEPT, UNASKED, Speculation, source_of
from mlx_provider.families.text import TextModel
from mlx_provider.records import Drafter, DraftRow, HiddenStatesModel
from mlx_provider.testing.driver import Alternating, Eager, new_engine, new_request, run
from references import assert_as_alone
from stepping import step_until, submit

TEXT = [20 + (i * i * 31 + i // 7) % 300 for i in range(120)]


class Noting:
    """A drafter that guesses a repetition of the text, and records the states of each row."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], mx.array]] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        for row in rows:
            assert row.hidden.shape[0] == row.fresh
            self.seen.append((list(row.tokens), row.hidden))
        return [[row.tokens[-1]] * row.wanted for row in rows]


def drafter(noting: Noting) -> Drafter:
    return Drafter(
        "noting",
        lambda folder, model, options: "",
        lambda folder, model, options: noting,
        hidden=True,
    )


def states(model: LoadedModel, tokens: Sequence[int]) -> mx.array:
    """(tokens, hidden) from one call of the model."""
    assert isinstance(model, HiddenStatesModel)
    chunk = PrefillChunk(Prompt(tokens), 0, len(tokens), model.make_cache())
    return model.prefill_hidden(chunk, len(tokens))[1]


def check(model: LoadedModel, noting: Noting) -> None:
    """Each state belongs to the token before the one that was drawn from it."""
    assert noting.seen
    for tokens, hidden in noting.seen:
        expected = states(model, tokens[:-1])[-hidden.shape[0] :]
        assert mx.max(mx.abs(hidden - expected)) < 1e-3


def speculation_with(noting: Noting, model: LoadedModel, **more: Any) -> Speculation:
    source = source_of(drafter(noting), noting, model)
    return Speculation(source, vocab=model.info.vocab_size, **more)


def serve(model: LoadedModel, requests: Sequence[Request], **more: Any) -> Noting:
    noting = Noting()
    speculation = speculation_with(noting, model, policy=Eager())
    engine = new_engine(model, speculation=speculation, scheduler=Alternating, **more)
    for request in requests:
        submit(engine, request, steps=3)
    run(engine)
    return noting


@pytest.mark.parametrize("mixes", [False, True])
def test_rows_that_join_in_chunks_and_drafts_that_fail(qwen3: TextModel, mixes: bool) -> None:
    sampled = SamplingParams(temperature=0.9, seed=4)
    requests = [new_request(TEXT[: 7 + 31 * i], max_tokens=12) for i in range(3)]
    requests += [new_request(TEXT[5:70], max_tokens=12, params=sampled, n=2)]
    noting = serve(qwen3, requests, mixes=mixes)
    check(qwen3, noting)
    assert sum(request.drafted for request in requests) > 20
    assert_as_alone(qwen3, *requests)
    if not mixes:  # the longest prompt has shown its maximum of states
        assert max(hidden.shape[0] for _, hidden in noting.seen) == KEPT


def test_states_that_cannot_be_joined_cost_no_request(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(0, 13, 3):
        noting = Noting()
        speculation = speculation_with(noting, qwen3, policy=Eager())
        engine = new_engine(qwen3, speculation=speculation)
        requests = decoding(engine)
        with monkeypatch.context() as patch:
            fail_once(patch, "concatenate", at)
            for _ in range(2):
                engine.step()
        run(engine)
        assert_as_alone(qwen3, *requests)


def test_a_cached_prefix_has_no_states(qwen3: TextModel) -> None:
    kept = PrefixCache(budget=lambda: 2**24)
    serve(qwen3, [new_request(TEXT[:60], max_tokens=4)], prefix_cache=kept)
    again = new_request(TEXT[:70], max_tokens=8)
    noting = serve(qwen3, [again], prefix_cache=kept)
    check(qwen3, noting)
    assert noting.seen[0][1].shape[0] <= 1 + 70 - again.cached_tokens + 8 < KEPT


def test_a_preempted_row_starts_again_with_the_states_of_its_reply(qwen3: TextModel) -> None:
    room, noting = [10_000], Noting()
    speculation = speculation_with(noting, qwen3, policy=Eager())
    engine = new_engine(
        qwen3, speculation=speculation, reserve=4, available=lambda: room[0], max_chunk=64
    )
    requests = [new_request(TEXT[: 80 + i], max_tokens=16) for i in range(3)]
    for request in requests:
        submit(engine, request, steps=1)
    room[0] = 250
    step_until(engine, lambda: engine.scheduler.queued_jobs)
    room[0], before = 10_000, len(noting.seen)
    run(engine)
    check(qwen3, noting)
    assert any(hidden.shape[0] == KEPT for _, hidden in noting.seen[before:])
    assert_as_alone(qwen3, *requests)


def test_states_of_many_prompts_are_bounded(qwen3: TextModel) -> None:
    """Without calls of a drafter, a limited number of rows keep the states of their prompts."""
    noting = Noting()
    speculation = speculation_with(noting, qwen3)
    width = mx.zeros((UNASKED // 2, 4))
    rows = [new_request([1, 2]).rows[0] for _ in range(4)]
    for row in rows:
        row.tokens.append(3)
        speculation.begin(row, SimpleNamespace(hidden=[width], tokens=[1, 2]))  # type: ignore[arg-type]
    counts = [sum(map(len, speculation.rows[row].hidden)) for row in rows]
    assert counts == [UNASKED // 2, UNASKED // 2, 1, 1]
