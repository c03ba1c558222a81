"""Every kind of cache reuses prefixes in each situation of an agent; a hit equals a cold run."""

from collections.abc import Callable
from typing import Any

import pytest

from integrity import check_integrity
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.snapshots import cuts_of
from mlx_provider.engine.request import Request
from mlx_provider.families.text import TextModel
from mlx_provider.families.tokenizer.hf_tokenizer import common_length
from mlx_provider.records import MediaSpan, Prompt
from mlx_provider.testing.driver import new_engine, new_request, run
from references import assert_as_alone, assert_near_alone
from stepping import submit

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text", "nemotron_h", "rwkv7")
HEADER = 24
"""Tokens at most between the end of the system part and the text of the user."""
Tiny = Callable[..., TextModel]
Messages = list[dict[str, Any]]

SYSTEM = {"role": "system", "content": "You look up weather. " * 8}
FIRST: Messages = [SYSTEM, {"role": "user", "content": "How is it in Paris? " * 8}]


def ask(engine: Engine, messages: Messages, busy: bool = False, **more: Any) -> Request:
    prompt = engine.model.prepare(messages, tools=[], media=[], variables={})
    request = new_request(prompt, max_tokens=10, logprobs=1, **more)
    beside = [new_request([50 + i] * (9 * i + 3), max_tokens=25) for i in range(3 * busy)]
    submit(engine, *beside, steps=4 * busy)
    run(engine, request)
    return request


SAMPLED = ("qwen3", "gpt_oss", "nemotron_h", "rwkv7")
"""One of each kind of cache, with two layers of it; the sweep has the others, and all quiet."""
QUIET = ("llama", "gemma3_text")
WAYS = [
    pytest.param(family, busy, marks=() if family in sampled else pytest.mark.sweep)
    for busy, sampled in ((True, SAMPLED), (False, QUIET))
    for family in FAMILIES
]


@pytest.mark.parametrize(("family", "busy"), WAYS)
def test_repeats_turns_and_results_reuse_prefixes(tiny: Tiny, family: str, busy: bool) -> None:
    model = tiny(family)
    engine = new_engine(model, prefix_cache=PrefixCache(budget=lambda: 2**24), max_chunk=64)
    cold = ask(engine, FIRST)
    assert cold.cached_tokens == 0
    before_tail = cold.prompt.snapshot_points[-1]

    repeat = ask(engine, FIRST, busy)
    assert repeat.cached_tokens >= before_tail - 1

    answer = {"role": "assistant", "content": "Sunny."}
    next_turn = ask(engine, [*FIRST, answer, {"role": "user", "content": "And Rome?"}], busy)
    assert next_turn.cached_tokens >= before_tail

    other_user = ask(engine, [SYSTEM, {"role": "user", "content": "Who are you?"}], busy)
    shared = common_length(other_user.prompt.tokens, cold.prompt.tokens)
    assert 32 < shared - HEADER <= other_user.cached_tokens < before_tail

    # Gemma's template has no tool messages; a result is the user's text
    role = "user" if family == "gemma3_text" else "tool"
    after_tool = ask(engine, [*FIRST, answer, {"role": role, "content": "22 degrees"}], busy)
    assert after_tool.cached_tokens >= before_tail

    assert_near_alone(model, cold, repeat, next_turn, other_user, after_tool)


def test_a_snapshot_is_worth_its_pass() -> None:
    """If a state cannot be cut, each snapshot needs one more pass."""
    short, long = 10, 100
    for ends, done, cuts in (
        ((short,), 0, ()),
        ((short, long), 0, (long,)),
        ((long, long + short), 0, (long,)),
        ((long, long + short, 2 * long), 0, (long, 2 * long)),
        ((long, 2 * long), long, (2 * long,)),
        ((long, 2 * long), 2 * long - short, ()),
        ((long, 2 * long), 2 * long, ()),
        ((), 0, ()),
    ):
        assert cuts_of(Prompt([1] * 300, snapshot_points=ends), done) == cuts
    image = MediaSpan(start=8, end=12, content_hash="x", inputs=None)
    assert cuts_of(Prompt([1] * 300, snapshot_points=(6, 90), spans=[image])) == (12, 90)


def test_tenants_do_not_share(tiny: Tiny) -> None:
    engine = new_engine(tiny("qwen3"), prefix_cache=PrefixCache(budget=lambda: 2**24))
    ask(engine, FIRST, salt="one")
    assert ask(engine, FIRST, salt="two").cached_tokens == 0
    assert ask(engine, FIRST, salt="one").cached_tokens > 0


def test_the_same_new_prefix_is_prefilled_once(tiny: Tiny) -> None:
    model = tiny("qwen3")
    engine = new_engine(model, prefix_cache=PrefixCache(budget=lambda: 2**24), max_chunk=32)
    shared = [30 + i % 300 for i in range(600)]
    requests = [new_request([*shared, 40 + i], max_tokens=5) for i in range(4)]
    run(engine, *requests)
    assert sorted(r.cached_tokens for r in requests) == [0, 600, 600, 600]
    assert_as_alone(model, *requests)


def test_a_miss_is_explained_by_the_token_where_the_prompt_differs(tiny: Tiny) -> None:
    engine = new_engine(tiny("qwen3"), prefix_cache=PrefixCache(budget=lambda: 2**24))
    ask(engine, FIRST)
    other = ask(engine, [SYSTEM, {"role": "user", "content": "How is it in Rome today?"}])
    assert "left the stored prefix at token" in other.explanation
    assert "Rome" in other.explanation


def test_the_next_request_reuses_a_cancelled_prefill(tiny: Tiny) -> None:
    engine = new_engine(tiny("qwen3"), prefix_cache=PrefixCache(budget=lambda: 2**24), max_chunk=32)
    tokens = [30 + i % 300 for i in range(300)]
    first = new_request(tokens, max_tokens=5)
    submit(engine, first, steps=4)
    engine.cancel(first)
    second = new_request(tokens, max_tokens=5)
    run(engine, second)
    assert second.cached_tokens == 4 * 32


def test_entries_are_evicted_for_running_rows(tiny: Tiny) -> None:
    model = tiny("qwen3")
    prefix_cache = PrefixCache(budget=lambda: 2**24)
    engine = new_engine(model, prefix_cache=prefix_cache, available=lambda: 10_000)
    wanted: list[int] = []

    def reclaim(need: int) -> None:
        wanted.append(need)
        prefix_cache.evict(max(0, 10_000 - need))

    vars(engine.scheduler.ledger).update(reclaim=reclaim)
    for i in range(6):
        ask(engine, [SYSTEM, {"role": "user", "content": f"question {i}"}])
    assert wanted
    assert prefix_cache.nbytes <= 2**24
    check_integrity(prefix_cache)
