"""Rows of whose prompts tokens were left out, against a forward pass written out here."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from equipped import equipped, load_by_family
from failing import Failing, First
from mlx_provider import LoadOptions
from mlx_provider.engine.execution.grouped_kv import MixedChunk
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.sparse_prefill import run_alone
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import PrefillChunk, Prompt
from mlx_provider.serving.drafting import problem
from mlx_provider.testing.driver import Eager, new_request, output_of, run
from mlx_provider.upstream.cache_classes import KVCache, SparseKVCache, sparse
from quantised import quantise
from schedules import Oracle
from stepping import step_until, submit
from tiny import build
from wrapped_model import WrappedModel

from .scores import Scripted, thinning

VOCAB = 384
Formed = Callable[[str], TextModel]


def text(length: int, seed: int = 0) -> list[int]:
    return [20 + (i * i * 31 + i // 7 + 101 * seed) % 300 for i in range(length)]


def logits_of(model: TextModel, tokens: Sequence[int], places: Sequence[int]) -> mx.array:
    """(vocab,) after the last of tokens at these places, which see those before them alone."""
    inner = model.model.model
    hidden = inner.embed_tokens(mx.array(list(tokens))[None])
    seen = mx.array(list(places))
    mask = seen[:, None] >= seen[None]
    for layer in inner.layers:
        own = layer.self_attn
        x = layer.input_layernorm(hidden)

        def heads(projected: mx.array, count: int) -> mx.array:
            return projected.reshape(1, len(places), count, -1).transpose(0, 2, 1, 3)

        q = own.q_norm(heads(own.q_proj(x), own.n_heads))
        k = own.k_norm(heads(own.k_proj(x), own.n_kv_heads))
        v = heads(own.v_proj(x), own.n_kv_heads)
        q, k = (
            mx.concatenate(
                [own.rope(each[:, :, i : i + 1], offset=at) for i, at in enumerate(places)], axis=2
            )
            for each in (q, k)
        )
        k, v = (mx.repeat(each, own.n_heads // own.n_kv_heads, axis=1) for each in (k, v))
        scores = mx.where(mask, (q * own.scale) @ k.swapaxes(2, 3), -mx.inf)
        mixed = (mx.softmax(scores, axis=-1) @ v).transpose(0, 2, 1, 3)
        hidden = hidden + own.o_proj(mixed.reshape(1, len(places), -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    out = inner.norm(hidden)[:, -1]
    head = inner.embed_tokens.as_linear if model.model.args.tie_word_embeddings else None
    return (head or model.model.lm_head)(out)[0]


def said(model: TextModel, request: Request) -> list[int]:
    """What follows the kept tokens, greedily, by a pass over all of them for every token."""
    places = list(request.selected or range(len(request.prompt.tokens)))
    tokens = [request.prompt.tokens[at] for at in places]
    for at in range(request.max_tokens):
        tokens.append(int(mx.argmax(logits_of(model, tokens, places)).item()))
        places.append(len(request.prompt.tokens) + at)
    return tokens[-request.max_tokens :]


@pytest.fixture(scope="module")
def in_format(tmp_path_factory: pytest.TempPathFactory) -> Formed:
    @cache
    def loaded(form: str) -> TextModel:
        folder, dtype = (
            tmp_path_factory.mktemp("sparse"),
            "float32" if form == "float32" else "bfloat16",
        )
        build(folder, "qwen3", dtype=dtype)
        if form == "4bit":
            quantise(folder, "qwen3")
        return equipped(load_text(folder, LoadOptions()))

    return loaded


def tokens_of(requests: Sequence[Request]) -> list[list[int]]:
    return [row.tokens for request in requests for row in request.rows]


def test_a_sparse_row_attends_only_to_kept_tokens_at_their_positions(qwen3: TextModel) -> None:
    for share, length in [(0.2, 420), (0.6, 301)]:
        request = new_request(text(length), max_tokens=3)
        run(thinning(qwen3, share=share, max_chunk=64), request)
        assert request.selected is not None
        assert abs(len(request.selected) - share * length) < 48 or share * length < 200
        assert request.prefilled_tokens == len(request.selected) < length
        assert request.rows[0].tokens == said(qwen3, request)


def test_the_skipped_tokens_do_not_affect_the_reply(qwen3: TextModel) -> None:
    class Fixed(Scripted):
        def scores(self, tokens: Sequence[int]) -> Any:
            return super().scores(text(600))

    one = new_request(text(600), max_tokens=12, logprobs=1)
    run(thinning(qwen3, Fixed()), one)
    assert one.selected is not None
    left = set(range(600)) - set(one.selected)
    changed = [340 if at in left else token for at, token in enumerate(text(600))]
    other = new_request(changed, max_tokens=12, logprobs=1)
    run(thinning(qwen3, Fixed()), other)
    assert other.selected == one.selected
    assert output_of(one).logprobs == output_of(other).logprobs


def test_the_time_of_scoring_counts_as_waiting_for_other_prompts(qwen3: TextModel) -> None:
    now = 0.0

    class Slow(Scripted):
        def scores(self, tokens: Sequence[int]) -> Any:
            nonlocal now
            now += 1.0
            return super().scores(tokens)

    engine = thinning(qwen3, Slow(pieces=2), clock=lambda: now)
    submit(engine, new_request(text(600), may_skip=False), steps=1)
    (other,) = engine.scheduler.waiting
    submit(engine, new_request(text(300)), steps=1)
    assert (now, other.waited_seconds) == (2.0, 2.0)
    run(engine)


def test_a_share_of_one_equals_a_whole_prefill(qwen3: TextModel) -> None:
    one, other = (new_request(text(400), max_tokens=12, logprobs=3) for _ in range(2))
    run(thinning(qwen3, share=1.0), one)
    engine = thinning(qwen3)
    engine.sparse_prefill = None
    run(engine, other)
    assert one.selected is None
    assert output_of(one).logprobs == output_of(other).logprobs


@pytest.mark.parametrize("form", ["float32", "bfloat16", "4bit"])
def test_a_sparse_prefill_without_gaps_equals_a_whole_prefill(form: str, in_format: Formed) -> None:
    """The way that sparse prompts take, with nothing left out: to the last digit in float32."""
    model = in_format(form)
    tokens, whole = text(300), model.make_cache()
    plain = [
        model.prefill(PrefillChunk(Prompt(tokens), *ends, whole)) for ends in [(0, 170), (170, 300)]
    ]
    own = sparse(model.make_cache())
    found = [
        run_alone(model, MixedChunk(tokens[a:b], range(a, b), own, sparse=True))
        for a, b in [(0, 170), (170, 300)]
    ]
    bound = 1e-4 if form == "float32" else 0.15
    for one, other in zip(plain, found, strict=True):
        assert mx.max(mx.abs(one - other)).item() < bound
    assert [layer.offset for layer in own] == [300] * len(own)


def mixed_requests() -> list[Request]:
    sampled = SamplingParams(temperature=1.1, top_p=0.95, seed=5)
    return [
        new_request(text(600), max_tokens=14),
        new_request(text(40), max_tokens=14),
        new_request(text(420, 1), max_tokens=14, logprobs=2),
        new_request(text(300, 2), max_tokens=14, params=sampled, n=2),
        new_request(text(600, 3), max_tokens=14, may_skip=False),
        new_request(text(260, 4), max_tokens=14, params=sampled),
    ]


def alone(model: TextModel, requests: Sequence[Request]) -> list[Request]:
    for request in requests:
        run(thinning(model, layout="solo", max_chunk=4096), request)
    return list(requests)


@pytest.fixture(scope="module")
def expected(qwen3: TextModel) -> list[Request]:
    return alone(qwen3, mixed_requests())


@pytest.mark.parametrize(
    ("layout", "drafts"),
    [("grouped", False), ("grouped", True), ("merged", False), ("solo", False)],
)
def test_sparse_rows_in_a_batch_get_the_tokens_of_each_alone(
    qwen3: TextModel, expected: list[Request], layout: str, drafts: bool
) -> None:
    """Staggered joins of all kinds, a cancel, a preemption, the same prompts once more."""
    oracle = Oracle(0.7, VOCAB)
    for each in expected:
        oracle.learn(each.rows[0].all_tokens)
    more: dict[str, Any] = {}
    if drafts:
        more["speculation"] = Speculation(
            Source(oracle), vocab=VOCAB, policy=Eager(), clock=lambda: 0.0
        )
    room = [10**9]
    kept = PrefixCache(budget=lambda: 2**24)
    engine = thinning(
        qwen3, layout=layout, max_chunk=64, reserve=4, mixes=layout == "grouped",
        prefix_cache=kept, available=lambda: room[0], **more,
    )  # fmt: skip
    found, gone = mixed_requests(), new_request(text(500, 9), max_tokens=50)
    for request in [*found[:3], gone, *found[3:]]:
        submit(engine, request, steps=5)
    step_until(engine, lambda: len(gone.rows[0].tokens) >= 4)
    engine.cancel(gone)
    step_until(engine, lambda: len(found[5].rows[0].tokens) >= 3)
    room[0] = 900
    engine.step()
    assert engine.scheduler.queued_jobs, "somebody waits for memory"
    room[0] = 10**9
    run(engine)
    again = mixed_requests()
    run(engine, *again)
    assert tokens_of(found) == tokens_of(expected)
    assert [each.selected for each in found] == [each.selected for each in expected]
    for each, other in zip(again, expected, strict=True):
        assert each.selected == other.selected
        assert each.selected is None or each.cached_tokens == 0
    assert tokens_of(again) == tokens_of(expected)
    assert again[4].cached_tokens > 500, "whole prompts are found again"
    reused = sum(each.cached_tokens for each in (*found, *again))
    assert kept.report()["reused_tokens"] == reused, "what is not used is no hit"
    if drafts:
        assert all(each.drafted for each in found if each.selected)


@pytest.mark.parametrize("form", ["bfloat16", "4bit"])
def test_low_precision_sparse_rows_nearly_equal_each_alone(form: str, in_format: Formed) -> None:
    """Where both go the same way, by the same chances as far as the format tells them."""
    model = in_format(form)
    requests = [new_request(text(270 + 60 * i, i), max_tokens=8, logprobs=1) for i in range(3)]
    twins = [new_request(r.prompt.tokens, max_tokens=8, logprobs=1) for r in requests]
    alone(model, twins)
    run(thinning(model, max_chunk=64), *requests)
    for own, twin in zip(requests, twins, strict=True):
        assert own.selected == twin.selected
        pairs = list(zip(output_of(own).logprobs, output_of(twin).logprobs, strict=True))
        same = next((i for i, (a, b) in enumerate(pairs) if a.id != b.id), len(pairs))
        assert same >= 1
        for a, b in pairs[:same]:
            assert a.logprob == pytest.approx(b.logprob, abs=0.1)


def test_a_failed_sparse_prefill_step_is_repeated_from_the_same_tokens(qwen3: TextModel) -> None:
    requests = [new_request(text(600), max_tokens=60), new_request(text(500, 1), max_tokens=60)]
    twins = [new_request(r.prompt.tokens, max_tokens=60) for r in requests]
    alone(qwen3, twins)
    twice = First(2, lambda tokens, places: len(tokens) == 2)
    run(thinning(Failing(qwen3, twice)), *requests)
    assert not twice.left
    assert tokens_of(requests) == tokens_of(twins)
    assert [r.selected for r in requests] == [r.selected for r in twins]


def test_a_sparse_cache_counts_its_tokens_and_its_position_separately() -> None:
    cache = SparseKVCache()
    tokens = mx.ones((1, 1, 6, 4))
    cache.append_at(tokens, tokens, [*range(5), 89])
    assert (cache.offset, cache.size()) == (90, 6)
    assert cache.make_mask(1) is None
    assert cache.make_mask(3, return_array=True).shape == (3, 9)
    keys, _ = cache.update_and_fetch(2 * tokens, tokens)
    assert (cache.offset, keys.shape[2]) == (96, 12)
    assert (cache.trim(4), cache.offset, cache.size()) == (4, 92, 8)
    with pytest.raises(ValueError, match="window"):
        cache.make_mask(3, window_size=8)


class OneByOne(KVCache):
    """A layer that holds all kept tokens."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
        return None


def by_one(model: Any, request: Request) -> list[int]:
    """What follows the kept tokens, greedily, token by token."""
    cache = [
        OneByOne() if hasattr(layer, "update_and_fetch") else layer for layer in model.make_cache()
    ]
    prompt, said = request.prompt.tokens, list[int]()
    for at in [*(request.selected or ()), *range(len(prompt), len(prompt) + request.max_tokens)]:
        token = prompt[at] if at < len(prompt) else said[-1]
        for layer in cache:
            if isinstance(layer, OneByOne):
                layer.offset = at
        logits = model.decode(mx.array([token]), cache, mx.array([at]))
        if at >= len(prompt) - 1:
            said.append(mx.argmax(logits[0]).item())
    return said[: request.max_tokens]


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_vl", pytest.param("qwen3_5_text", marks=pytest.mark.sweep), "qwen3_5"],
)
def test_recurrent_states_cover_kept_tokens_only(family: str, folder: Callable[..., Path]) -> None:
    model = equipped(load_by_family(folder(family)))
    assert problem(model, model.make_cache) == ""
    alone, company = (new_request(text(420), max_tokens=12) for _ in range(2))
    run(thinning(model, share=0.3, layout="solo", max_chunk=4096), alone)
    run(thinning(model, share=0.3, max_chunk=64), new_request(text(40), max_tokens=30), company)
    assert alone.selected == company.selected is not None
    assert alone.rows[0].tokens == company.rows[0].tokens == by_one(model, alone)


def test_a_model_with_positions_from_its_cache_fails_the_sparse_trial(qwen3: TextModel) -> None:
    """Whatever it makes of what a cache holds, of where tokens stand, shows in the trial."""

    class Counting(WrappedModel):
        def decode(self, tokens: mx.array, cache: Any, positions: mx.array, *at: Any) -> mx.array:
            found = qwen3.decode(tokens, cache, positions, *at)
            return found + (mx.arange(VOCAB) % 7) * (mx.max(positions) // 50)

    assert problem(qwen3, qwen3.make_cache) == ""
    assert "log-probabilities differ" in problem(Counting(qwen3), qwen3.make_cache)  # type: ignore[arg-type]
