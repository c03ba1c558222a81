"""Running rows share the keys of their common prefix, and get the results that they get alone."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from integrity import check_integrity
from mlx_provider import LoadedModel, MediaItem
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache import segments
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.engine.row_cache import arrays, profile
from mlx_provider.engine.scheduling.ledger import STEP_TOKENS, whole_steps
from mlx_provider.engine.scheduling.step import StepPlan
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import TextModel
from mlx_provider.records import PrefillChunk, Prompt
from mlx_provider.serving.probe import probe
from mlx_provider.testing.driver import Alternating, Eager, new_engine, new_request, output_of, run
from mlx_provider.upstream import mlx_lm
from mlx_provider.upstream import shared_kv as shared_attention
from mlx_provider.upstream.cache_classes import layers_of
from mlx_provider.upstream.shared_kv import Prefix, SharedBatchKV, prefix_of
from noted_calls import note_calls
from references import alone, assert_near_alone, quantised
from schedules import Oracle
from stepping import step_until

FAMILIES = ("qwen3", "gemma3_text", "qwen3_5_text")
"""One of each kind of cache that has layers with every token."""
LEAST = 16
COMMON = [20 + i * i % 300 for i in range(200)]
REPLY = 16
Tiny = Callable[..., TextModel]
Seeing = Callable[[str], tuple[Any, MediaItem]]


def sharing(
    model: LoadedModel, budget: Callable[[], int] = lambda: 2**26, **more: Any
) -> tuple[Engine, PrefixCache]:
    cache = PrefixCache(budget=budget)
    more = {"max_chunk": 64, "scheduler": Alternating, "mixes": True, **more}
    return new_engine(model, prefix_cache=cache, min_shared=LEAST, **more), cache


def branch(i: int, reply: int = REPLY) -> Request:
    tokens = [*COMMON, *(40 + (i * 31 + j) % 200 for j in range(1 + 7 * i % 23))]
    request = new_request(tokens, max_tokens=reply, logprobs=1)
    request.prompt = Prompt(tokens, snapshot_points=(len(COMMON),))
    return request


def decoding(engine: Engine, request: Request, tokens: int = 3) -> None:
    """Submit a request and run until it has some tokens."""
    engine.submit(request)
    step_until(engine, lambda: len(request.rows[0].tokens) >= tokens, most=200)


def layers(engine: Engine) -> Iterator[Any]:
    layout = engine.batch.layout
    for group in layout.groups:
        yield from layers_of(group.cache)


def prefixes(engine: Engine) -> set[Prefix]:
    return {prefix for each in layers(engine) if (prefix := prefix_of(each)) is not None}


def taken(engine: Engine) -> int:
    """Bytes of the buffers of decoding rows, and of their prefixes."""
    every = [(each.keys, each.values) for each in (*layers(engine), *prefixes(engine))]
    return sum(a.nbytes for _, a in tree_flatten(every))


@pytest.mark.parametrize("family", FAMILIES)
def test_running_rows_share_one_copy_of_their_prefix(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    engine, cache = sharing(model)
    requests = [branch(i) for i in range(4)]
    decoding(engine, requests[0])
    assert not prefixes(engine)  # no other row: one buffer for each layer
    own = len(COMMON)
    for request in requests[1:]:
        decoding(engine, request)
        assert request.cached_tokens >= own - LEAST
    held = prefixes(engine)
    each_layer = [each for each in layers(engine) if prefix_of(each) is not None]
    assert len(each_layer) == len(held), "one prefix a layer, and one group of all rows"
    assert all(isinstance(each, SharedBatchKV) for each in each_layer)
    assert all(prefix.length >= own - LEAST for prefix in held)
    tails = sum(a.nbytes for a in arrays(each_layer))
    once = sum(prefix.keys.nbytes + prefix.values.nbytes for prefix in held)
    assert once + tails < 4 * once * 2  # four rows of one step of capacity, and one prefix
    run(engine)
    assert_near_alone(model, *requests)
    check_integrity(cache)


def test_quantised_rows_read_their_prefix_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caches stay separate, and a step has one product over the prefix in each layer."""
    model, bits = tiny("qwen3", head_dim=32), 8
    engine, cache = sharing(model, make_cache=quantised(model, bits))
    requests = [branch(i, 24) for i in range(4)]
    for request in requests:
        decoding(engine, request)
    engine.step()
    held = {id(prefix.keys) for prefix in prefixes(engine)}
    assert len(held) == len(model.make_cache())
    assert all(prefix.length >= len(COMMON) - LEAST for prefix in prefixes(engine))
    read = note_calls(monkeypatch, shared_attention, "_partial", lambda queries, keys, *_: id(keys))
    engine.step()
    assert sorted(each for each in read if each in held) == sorted(held)
    assert len(read) == len(held) * (1 + len(requests))
    run(engine)
    assert_near_alone(model, *requests, bits=bits)
    check_integrity(cache)


def test_a_hit_on_a_shared_prefix_copies_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the tokens that are copied to new buffers."""
    copied = []
    copy = segments.copy_tokens

    def counted(piece: mx.array, *more: Any) -> None:
        copied.append(piece.shape[-2])
        copy(piece, *more)

    monkeypatch.setattr(segments, "copy_tokens", counted)
    engine, _ = sharing(tiny("qwen3"))
    decoding(engine, branch(0))
    decoding(engine, branch(1))
    held = prefixes(engine)
    decoding(engine, branch(2))
    assert held
    assert prefixes(engine) == held
    assert not copied
    plain = new_engine(tiny("qwen3"), prefix_cache=PrefixCache(budget=lambda: 2**26), max_chunk=64)
    decoding(plain, branch(0))
    decoding(plain, branch(1))
    assert copied


def test_a_row_behind_a_part_of_a_prefix_reserves_the_rest(tiny: Tiny) -> None:
    model = tiny("qwen3")
    row = model.make_cache()
    model.prefill(PrefillChunk(Prompt(COMMON), 0, len(COMMON), row))
    engine, _ = sharing(model, row_bytes=(memory := profile(row)).row_bytes)
    for i in range(2):
        decoding(engine, branch(i))
    part, own = 120, 400
    early = new_request([*COMMON[:part], *(90 + i % 100 for i in range(own))], max_tokens=REPLY)
    decoding(engine, early)
    assert min(prefix.length for prefix in prefixes(engine)) == early.cached_tokens == part
    reserved = engine.scheduler.ledger.reservation
    room = part + whole_steps(own + REPLY)  # its own buffers have whole steps
    stored = part + own  # its prompt is an entry already
    assert reserved(early.rows) == (room - stored) * memory.token_bytes


@pytest.mark.parametrize("bits", [None, 8])
def test_rows_behind_a_prefix_are_charged_for_their_memory(tiny: Tiny, bits: int | None) -> None:
    """For rows that began behind it or were divided, merged or separate. Merged rows grow together:
    shorter ones can grow some steps before they are charged for it."""
    model = tiny("qwen3", head_dim=32)
    make_cache = quantised(model, bits) or model.make_cache
    row = make_cache()
    model.prefill(PrefillChunk(Prompt(COMMON), 0, len(COMMON), row))
    memory = profile(row)
    engine, cache = sharing(model, make_cache=make_cache, row_bytes=memory.row_bytes)
    apart = bits is not None
    own = [[40 + (i * 31 + j) % 200 for j in range(190 * apart + i)] for i in range(3)]
    requests = [new_request([*COMMON, *tokens], max_tokens=400) for tokens in own]
    for request in requests:
        decoding(engine, request)
    compared = 0
    for _ in range(90):  # beyond the end of a capacity step
        engine.step()
        assert taken(engine) <= engine.scheduler.live_bytes + cache.in_use
        compared += bool(prefixes(engine))
    assert compared == 90


Operation = tuple[str, int, int]
"""(what, which branch or request, steps after it)"""
STORM: list[Operation] = [
    ("fork", 1, 2), ("fork", 2, 0), ("fork", 3, 3), ("cancel", 1, 1), ("evict", 0, 1),
    ("fork", 4, 2), ("shrink", 0, 4), ("fork", 1, 1), ("cancel", 3, 0), ("grow", 0, 3),
    ("fork", 5, 2), ("fill", 0, 2), ("fork", 6, 2), ("fork", 7, 3),
]  # fmt: skip
BETWEEN = [
    ("cancel", 7, 1), ("evict", 0, 0), ("shrink", 0, 3), ("fork", 0, 1), ("fill", 0, 0),
    ("grow", 0, 0),
]  # fmt: skip
WIDE: list[Operation] = [
    each
    for i in range(32)
    for each in [("fork", i, i % 3), *([BETWEEN[i // 2 % len(BETWEEN)]] if i % 2 else [])]
]
"""32 branches, and as many operations between as half of that."""
WHAT = st.sampled_from(["fork", "fork", "fork", "cancel", "evict", "shrink", "fill", "grow"])
STORMS = st.lists(st.tuples(WHAT, st.integers(0, 8), st.integers(0, 6)), min_size=6, max_size=48)


def storm(
    model: LoadedModel,
    ask: Callable[[int], Request],
    what: list[Operation],
    bits: int | None = None,
) -> tuple[int, int]:
    """One prompt with many branches, cancellation, preemption and eviction; the prompt fills the
    prefix cache. Each branch gets the result that it gets alone. Rows, with the entries that they
    use, stay within the memory, except prompts that were admitted before the memory shrank.
    Rows that are never merged need no more memory than they are charged.
    Returns the maximum number of layers with a shared prefix, and of rows that waited for memory.
    """
    room, budget, most, waited = 2**30, 2**26, 0, 0
    what = [("fork", 0, 6), *what]
    make_cache = quantised(model, bits) or model.make_cache
    row = make_cache()
    model.prefill(PrefillChunk(Prompt(COMMON), 0, len(COMMON), row))
    memory = profile(row)
    asked = {which for each, which, _ in what if each == "fork"}
    longest = max(len(ask(which).prompt.tokens) for which in asked) + REPLY
    # a prefix in use can be longer than its only row's part of it; the row's tail has whole steps
    least = memory.row_bytes(longest) + (LEAST + STEP_TOKENS) * memory.token_bytes
    early: set[Any] = set()

    class Watched(Alternating):
        """Checks before each pass that the rows are within the memory."""

        def charge_step(self, plan: StepPlan) -> None:
            alone = self.active_rows <= 1 or early & {*self.waiting}
            assert alone or self.live_bytes + cache.in_use <= room
            super().charge_step(plan)

    engine, cache = sharing(
        model, lambda: budget, available=lambda: room - cache.in_use, row_bytes=memory.row_bytes,
        make_cache=make_cache, scheduler=Watched,
    )  # fmt: skip
    vars(engine.scheduler.ledger).update(available_alone=lambda: room)
    requests: list[Request] = []
    cancelled: set[str] = set()
    for each, which, steps in what:
        if each == "fork":
            requests.append(ask(which))
            engine.submit(requests[-1])
        elif each == "cancel":
            gone = requests[which % len(requests)]
            engine.cancel(gone)
            cancelled.add(gone.id)
        elif each == "evict":
            cache.evict(0)
        else:
            room = least if each == "shrink" else 2**30
            budget = memory.row_bytes(len(COMMON) + LEAST) if each == "fill" else 2**26
            cache.evict(budget)
            early = {job for job in engine.scheduler.waiting if job.admitted}
        for _ in range(steps):
            engine.step()
            charged = engine.scheduler.live_bytes + cache.in_use
            assert not bits or taken(engine) <= charged, "nothing but buffers of single rows"
            waited = max(waited, len(engine.scheduler.queued_jobs) if each == "shrink" else 0)
            most = max(most, len(prefixes(engine)))
    room = 2**30
    run(engine)
    for request in requests:
        assert_near_alone(model, request, whole=request.id not in cancelled, bits=bits)
    check_integrity(cache)
    return most, waited


def looking(model: Any, item: MediaItem, question: str, reply: int) -> Request:
    content = [{"type": "image"}, {"type": "text", "text": f"{'See here. ' * 30}{question}"}]
    messages = [{"role": "user", "content": content}]
    prompt: Prompt = model.prepare(messages, tools=[], media=[item], variables={})
    return new_request(prompt, max_tokens=reply, logprobs=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_behind_a_shared_prefix_get_the_tokens_of_each_alone(tiny: Tiny, family: str) -> None:
    assert all(storm(tiny(family), branch, STORM))


def test_quantised_forks_behind_a_shared_prefix_get_the_tokens_of_each_alone(tiny: Tiny) -> None:
    assert all(storm(tiny("qwen3", head_dim=32), branch, STORM, bits=4))


def behind_an_image(seeing: Seeing) -> tuple[Any, Callable[[int], Request]]:
    model, item = seeing("qwen3_vl")
    return model, lambda i: looking(model, item, f"Is it {i}{'?' * (i % 9)}", REPLY)


def test_forks_behind_a_shared_image_get_the_tokens_of_each_alone(seeing: Seeing) -> None:
    assert all(storm(*behind_an_image(seeing), STORM))


def test_drafts_are_verified_over_a_shared_prefix(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For rows with drafts and a row without: one product over the prefix in each layer."""
    model, oracle = tiny("qwen3"), Oracle(0.7)
    requests = [branch(i) for i in range(3)]
    for request in requests:
        oracle.learn([*request.prompt.tokens, *output_of(alone(model, request)).tokens])
    speculation = Speculation(Source(oracle), vocab=model.info.vocab_size, policy=Eager())
    engine, _ = sharing(model, speculation=speculation, clock=lambda: 0.0)
    counts: list[int] = []
    attended = shared_attention.attend_separately

    def counted(calls: Any, scale: float) -> Any:
        counts.extend(call.queries.shape[2] for call in calls)
        return attended(calls, scale)

    monkeypatch.setattr("mlx_provider.upstream.attention.attend_separately", counted)
    for request in requests:
        decoding(engine, request, 2)
    assert prefixes(engine)
    counts.clear()  # calls for short chunks
    run(engine)
    assert max(counts) > 2, "drafts are among the queries"
    assert_near_alone(model, *requests)


def test_the_probe_lets_quantised_rows_share(tiny: Tiny) -> None:
    model = tiny("qwen3", head_dim=32)
    found = probe(model, lambda: mlx_lm.quantise_cache(model.make_cache(), 8, 32), ("grouped",))
    assert found.shares, found.notes


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_32_forks_of_a_prefix_get_the_tokens_of_each_alone(tiny: Tiny, family: str) -> None:
    assert all(storm(tiny(family), branch, WIDE))


@pytest.mark.sweep
def test_32_forks_behind_a_shared_image_get_the_tokens_of_each_alone(seeing: Seeing) -> None:
    assert all(storm(*behind_an_image(seeing), WIDE))


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_any_sequence_of_forks_gets_the_tokens_of_each_alone(tiny: Tiny, family: str) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
    @given(what=STORMS)
    def check(what: list[Operation]) -> None:
        storm(tiny(family), branch, what)

    check()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_rows_share_a_prefix_with_an_image_and_get_the_tokens_of_each_alone(
    family: str, seeing: Seeing, caplog: pytest.LogCaptureFixture
) -> None:
    model, item = seeing(family)
    engine, _ = sharing(model, max_chunk=256)
    for question in ("Which is the first?", "How many are there?"):  # the branch is stored
        run(engine, looking(model, item, question, 1))
    requests = [looking(model, item, each, 30) for each in ("How much of it?", "Is it red?")]
    for request in requests:
        decoding(engine, request)
    assert min(prefix.length for prefix in prefixes(engine)) > 64
    run(engine)
    assert "failed" not in caplog.text, "no pass had to run again"
    assert_near_alone(model, *requests)
