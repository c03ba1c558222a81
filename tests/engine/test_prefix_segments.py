"""A hit equals a cold run: rows rebuilt from the prefix cache, on real model classes."""

from functools import cache, partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from integrity import check_integrity
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.segments import copies, take_snapshot
from mlx_provider.engine.prefix_cache.tree import CacheKey
from mlx_provider.engine.row_cache import Kind, Unstorable, kind, strictest, window_attributes
from tiny import build
from tolerances import logprob_tolerance

KEY = CacheKey("tiny")
CHUNK = 17


@pytest.fixture
def prefix_cache() -> PrefixCache:
    return PrefixCache(budget=lambda: 2**40)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Loaded tiny models by family name, each built once."""
    from mlx_lm.utils import load_model

    @cache
    def get(family: str, **overrides):
        return load_model(build(tmp_path_factory.mktemp(family) / "model", family, **overrides))[0]

    return get


def prefill(model, cache, ids, start: int, stop: int) -> mx.array:
    """Logprobs after the last token."""
    out = None
    for at in range(start, stop, CHUNK):
        out = model(mx.array([ids[at : min(at + CHUNK, stop)]]), cache=cache)[0, -1]
        mx.eval(out)
    return out - mx.logsumexp(out)


def greedy(model, cache, logprobs, steps: int = 12) -> tuple[list[int], np.ndarray]:
    tokens, rows = [], []
    for _ in range(steps):
        tokens.append(int(mx.argmax(logprobs)))
        rows.append(np.array(logprobs.astype(mx.float32)))
        out = model(mx.array([[tokens[-1]]]), cache=cache)[0, -1]
        logprobs = out - mx.logsumexp(out)
    return tokens, np.stack(rows)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(20, 300, length)]


def answer(model, row, ids, held: int = 0) -> tuple[list[int], np.ndarray]:
    """Prefill what the row does not hold yet, and decode."""
    return greedy(model, row, prefill(model, row, ids, held, len(ids)))


def keeping(model) -> list[RotatingKVCache]:
    return [RotatingKVCache(max_size=16, keep=4) for _ in model.layers]


def serve(prefix_cache, model, make, ids) -> tuple[int, tuple[list[int], np.ndarray]]:
    """Match, restore, prefill, decode and insert, as the engine does."""
    match = prefix_cache.match(KEY, ids, len(ids) - 1)
    row = prefix_cache.acquire(match, make)[0]
    reply = answer(model, row, ids, match.length)
    prefix_cache.insert(KEY, [*ids, *reply[0]], row, {})
    check_integrity(prefix_cache)
    return match.length, reply


def assert_equal(hit, cold) -> None:
    assert hit[0] == cold[0]
    assert np.abs(hit[1] - cold[1]).max() <= logprob_tolerance()


@pytest.mark.parametrize("length", [10, 23, 24, 25, 40, 70])
def test_a_rotating_window_resumes_at_any_rotation(length, model_of, prefix_cache) -> None:
    """Decoding and chunked prefill leave different orders in the rotating buffer."""
    model = model_of("gemma3_text")
    ids = prompt(length)
    make = partial(make_prompt_cache, model)
    for chunked in (True, False):
        key = CacheKey(str(chunked))
        cache = make()
        if chunked:
            prefill(model, cache, ids, 0, length)
        else:
            for token in ids:
                model(mx.array([[token]]), cache=cache)
        prefix_cache.insert(key, ids, cache, {})
        more = [*ids, *prompt(7, 9)]
        match = prefix_cache.match(key, more, len(more) - 1)
        assert match.length == length
        row = prefix_cache.acquire(match, make)[0]
        hit = answer(model, row, more, length)
        assert_equal(hit, answer(model, make(), more))


def test_a_rotating_cache_that_keeps_its_first_tokens_resumes_like_a_cold_run(
    model_of, prefix_cache
) -> None:
    """As with `--max-kv-size`: the first `keep` tokens stay in the buffer and in its snapshot."""
    model = model_of("qwen3")
    make = partial(keeping, model)
    ids = prompt(40)
    cache = make()
    first = prefill(model, cache, ids, 0, 40)
    cold = greedy(model, cache, first, 20)
    row = make()
    prefill(model, row, ids, 0, 40)
    held = greedy(model, row, first, 7)[0]
    prefix_cache.insert(KEY, [*ids, *held], row, {})
    match = prefix_cache.match(KEY, [*ids, *cold[0]], 47)
    assert match.length == 47
    again = prefix_cache.acquire(match, make)[0]
    logprobs = model(mx.array([[cold[0][7]]]), cache=again)[0, -1]
    rest = greedy(model, again, logprobs - mx.logsumexp(logprobs), 12)
    assert rest[0] == cold[0][8:20]
    assert np.abs(rest[1] - cold[1][8:20]).max() <= logprob_tolerance()


CHECKPOINTS = [
    pytest.param(start, windows, marks=() if (i + j) % 2 == 0 else pytest.mark.sweep)
    for i, start in enumerate((0, 5, 23, 40))
    for j, windows in enumerate(("gemma3_text", "llama4", "kept"))
]
"""Half of them; the sweep has all."""


@pytest.mark.parametrize(("start", "windows"), CHECKPOINTS)
def test_a_window_gives_a_snapshot_inside_its_last_pass(
    start, windows, model_of, prefix_cache
) -> None:
    """No pass ends at that token, but the window still holds all tokens of the snapshot."""
    model = model_of("qwen3" if windows == "kept" else windows)
    make = partial(keeping if windows == "kept" else make_prompt_cache, model)
    assert strictest(make()) is Kind.WINDOW
    ids = prompt(70)
    cache = make()
    if start:
        model(mx.array([ids[:start]]), cache=cache)
    model(mx.array([ids[start:]]), cache=cache)
    for at, following in [(start + 1, 7), (start + 14, 7), (69, 7), (start + 1, 1)]:
        key = CacheKey(f"{at} {following}")
        prefix_cache.insert(key, ids, cache, {at: prefix_cache.snapshot(cache, at)})
        more = [*ids[:at], *prompt(following, 9)]
        match = prefix_cache.match(key, more, len(more) - 1)
        row = prefix_cache.acquire(match, make)[0]
        assert match.length == at
        hit = answer(model, row, more, at)
        # `RotatingKVCache.make_mask` ignores `keep`, so the cold row must have equal chunks
        fresh = make()
        for stop in sorted({start, at} - {0}):
            model(mx.array([more[fresh[0].offset : stop]]), cache=fresh)
        assert_equal(hit, answer(model, fresh, more, at))


def test_a_state_gives_no_snapshot_of_an_earlier_token(model_of, prefix_cache) -> None:
    model = model_of("qwen3_5_text")
    cache = make_prompt_cache(model)
    assert strictest(cache) is Kind.STATE
    prefill(model, cache, prompt(10), 0, 10)
    with pytest.raises(ValueError, match="after 9 tokens"):
        take_snapshot(cache, 9)
    assert prefix_cache.snapshot(cache, 9) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_kv_resumes_like_a_cold_run(bits, model_of, prefix_cache) -> None:
    model = model_of("llama", head_dim=32)  # mlx quantises in groups of 32 or more

    def make() -> list:
        return [QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]

    ids = prompt(50)
    serve(prefix_cache, model, make, ids)
    for more in ([*ids, *prompt(6, 3)], [*ids[:33], *prompt(6, 4)]):
        length, hit = serve(prefix_cache, model, make, more)
        assert length == (50 if more[:50] == ids else 33)
        assert_equal(hit, answer(model, make(), more))


def test_rows_that_leave_a_batch_are_stored(model_of, prefix_cache) -> None:
    """Rows from upstream's `extract` of a merged cache must be restored exactly."""
    model = model_of("qwen3_5_text")
    make = partial(make_prompt_cache, model)
    prompts = [prompt(30, 1), prompt(21, 2)]
    rows = []
    for ids in prompts:
        rows.append(make())
        prefill(model, rows[-1], ids, 0, len(ids))
    together = [type(a).merge([a, b]) for a, b in zip(*rows, strict=True)]
    model(mx.array([[40], [41]]), cache=together)
    for index, (ids, token) in enumerate(zip(prompts, (40, 41), strict=True)):
        prefix_cache.insert(KEY, [*ids, token], [layer.extract(index) for layer in together], {})
    for ids, token in zip(prompts, (40, 41), strict=True):
        more = [*ids, token, 50, 51]
        match = prefix_cache.match(KEY, more, len(more) - 1)
        assert match.length == len(ids) + 1
        row = prefix_cache.acquire(match, make)[0]
        hit = answer(model, row, more, match.length)
        assert_equal(hit, answer(model, make(), more))


def test_vision_packages_classes_are_known() -> None:
    """mlx-vlm has its own classes with the same structure."""
    from mlx_vlm.models import cache as vlm

    assert kind(vlm.KVCache()) is kind(KVCache()) is Kind.APPEND
    assert kind(vlm.QuantizedKVCache()) is kind(QuantizedKVCache()) is Kind.APPEND
    assert kind(vlm.RotatingKVCache(8)) is kind(RotatingKVCache(8)) is Kind.WINDOW
    assert kind(vlm.ChunkedKVCache(8)) is kind(ChunkedKVCache(8)) is Kind.WINDOW
    assert kind(vlm.ArraysCache(2)) is kind(ArraysCache(2)) is Kind.STATE
    assert kind(ConcatenateKVCache()) is Kind.APPEND
    assert kind(vlm.BufferedRotatingKVCache(8)) is Kind.STATE  # it has unused capacity of its own
    with pytest.raises(Unstorable):
        kind(3)


@pytest.mark.parametrize("package", ["mlx_lm", "mlx_vlm"])
def test_states_of_both_packages_round_trip(package, prefix_cache) -> None:
    import importlib

    cls = importlib.import_module(f"{package}.models.cache").ArraysCache
    row = cls(2)
    row[0], row[1] = mx.ones((1, 3)), None
    prefix_cache.insert(KEY, [1, 2, 3], [row], {})
    row[0] = row[0] * 5
    again = prefix_cache.acquire(prefix_cache.match(KEY, [1, 2, 3, 4], 3), lambda: [cls(2)])[0][0]
    assert again[0].tolist() == [[1, 1, 1]]
    assert again[1] is None
    assert again.batch_size == 1


def test_copies_keep_no_larger_buffer_alive() -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    big = mx.zeros((1, 1, 4_000_000, 1))
    mx.eval(big)
    (made,) = copies({0: [big[..., :1000, :]]})[0]
    del big
    assert mx.get_active_memory() - before < 100_000
    assert made.nbytes == 4000


def feed(layer, start: int, stop: int) -> tuple:
    new = mx.arange(start, stop).astype(mx.float32).reshape(1, 1, -1, 1)
    return layer.update_and_fetch(new, -new)


@pytest.mark.parametrize("keep", [0, 4])
def test_a_snapshot_after_a_long_chunk_has_only_the_window(keep, prefix_cache) -> None:
    """Upstream holds the whole chunk until the next update; a snapshot only the window."""

    row = RotatingKVCache(max_size=16, keep=keep)
    feed(row, 0, 100)
    assert row.keys.shape[2] == 100
    prefix_cache.insert(KEY, list(range(100)), [row], {})
    assert prefix_cache.report()["snapshots"] == 1
    assert prefix_cache.nbytes == 16 * 8 + 100 * 8


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("held", [7, 16, 17, 100])
@pytest.mark.parametrize("steps", [(1,) * 20, (3, 1, 1), (20, 1)])
def test_a_restored_window_continues_like_the_original(keep, held, steps, prefix_cache) -> None:
    def live() -> RotatingKVCache:
        row = RotatingKVCache(max_size=16, keep=keep)
        feed(row, 0, held)
        return row

    prefix_cache.insert(KEY, list(range(held)), [live()], {})
    match = prefix_cache.match(KEY, list(range(held + 2)), held + 1)
    again = prefix_cache.acquire(match, lambda: [RotatingKVCache(max_size=16, keep=keep)])[0][0]
    other, at = live(), held
    for step in steps:
        pairs = zip(feed(again, at, at + step), feed(other, at, at + step), strict=True)
        assert all(mx.array_equal(a, b).item() for a, b in pairs)
        at += step


def test_a_window_gives_no_snapshot_of_tokens_that_it_dropped():
    window = RotatingKVCache(max_size=8)
    for count in (16, 4):
        window.update_and_fetch(*(mx.random.normal((1, 1, count, 4)) for _ in range(2)))
    assert window_attributes(window, 17)["keys"].shape[2] == 8, "what the last pass appended goes"
    with pytest.raises(ValueError, match="after 16 tokens"):
        window_attributes(window, 16)
