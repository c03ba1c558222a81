"""Allocations and copies of a row's cache, by the rules of MLX's allocator on a Mac."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from allocator_replay import DIM, LAYERS, TOKEN_ROW_BYTES, WEIGHTS, Replay, StandIn, cold_prefill
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.row_cache import grow_by
from mlx_provider.engine.scheduling.ledger import kv_capacity, kv_growth
from mlx_provider.testing.driver import new_engine, new_request, run

PROMPT, RESERVE = 32_000, 512


@pytest.mark.parametrize("chunk", [2048, 320])
def test_a_cold_prefill_copies_nothing(chunk: int) -> None:
    found = cold_prefill(PROMPT, RESERVE, chunk)
    kv = PROMPT * TOKEN_ROW_BYTES
    assert found.room >= PROMPT + RESERVE - 1
    assert found.copied == 0
    assert found.pool.peak <= 1.3 * (WEIGHTS + kv)
    assert found.pool.fresh <= 1.05 * kv


def test_real_buffers_are_written_in_place() -> None:
    """MLX copies a buffer if another reference to it exists."""
    model = StandIn()
    engine = new_engine(model, max_chunk=512, reserve=RESERVE)  # type: ignore[arg-type]
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run(engine, new_request([1] * PROMPT, max_tokens=20))
    row = 2 * LAYERS * (PROMPT + 256) * DIM * 2
    assert mx.get_peak_memory() - before <= 1.1 * row


def test_a_step_copies_no_tokens_of_the_reply() -> None:
    """Else a long reply costs its length squared."""
    read = [0]

    class Watched(list[int]):
        def __iter__(self) -> Iterator[int]:
            read[0] += len(self)
            return super().__iter__()

        def copy(self) -> list[int]:
            return [*self]

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            read[0] += len(found) if isinstance(key, slice) else 0
            return found

    engine = new_engine(StandIn())  # type: ignore[arg-type]
    request = new_request([1] * 50, max_tokens=400)
    (row,) = request.rows
    row.tokens = Watched(row.tokens)
    run(engine, request)
    assert len(row.tokens) == 400
    assert isinstance(row.tokens, Watched), "else the list was replaced by a copy"
    assert read[0] <= 2 * len(row.tokens)


def test_a_row_after_a_prefix_hit_makes_no_further_copy() -> None:
    model = StandIn()
    stored = PrefixCache(budget=lambda: 2**40)
    engine = new_engine(model, max_chunk=2048, reserve=RESERVE, prefix_cache=stored)  # type: ignore[arg-type]
    run(engine, new_request([1] * 3000, max_tokens=2))
    model.replay = Replay()
    again = new_request([1] * 9000, max_tokens=RESERVE)
    run(engine, again)
    assert again.cached_tokens > 2900
    assert model.replay.copied == 0
    assert model.replay.room == 12_544  # the prompt, the reserve, and again the length of the hit


def test_the_cache_of_a_reply_beyond_its_reserve_grows_rarely() -> None:
    model = StandIn()
    accounts = []
    engine = new_engine(model, max_chunk=2048, reserve=64)  # type: ignore[arg-type]
    request = new_request([1] * 8000, max_tokens=1500)
    engine.submit(request)
    rooms = []
    while not engine.idle:
        engine.step()
        rooms.append(model.replay.room)
        if engine.scheduler.running:
            accounts.append(engine.scheduler.live_bytes)  # of one byte a token
            assert rooms[-1] <= -(-accounts[-1] // 256) * 256
    assert sorted(set(rooms)) == [8192, 9216, 10240]


def test_growth_is_bounded_by_the_remaining_tokens() -> None:
    assert kv_growth(1000, 1010) == 256
    assert kv_growth(1000, 9000) == 1024
    assert kv_growth(80_000, 120_000) == 10_240
    assert kv_capacity(1000, 9000, 1000) == 1000
    assert kv_capacity(1000, 9000, 1025) == 2048
    assert kv_capacity(1000, 1000, 1001) == 1024
    assert kv_capacity(60, 345, 257) == 512  # not 768


def appended(cache: Any, tokens: int) -> Any:
    new = mx.random.normal((1, 2, tokens, 64))
    cache.update_and_fetch(new, new)
    return cache


def rooms(cache: Any) -> set[int]:
    keys = cache.keys if isinstance(cache.keys, tuple | list) else (cache.keys,)
    return {a.shape[2] for a in keys}


@pytest.mark.parametrize("make", [KVCache, QuantizedKVCache])
def test_plain_and_quantised_layers_get_their_capacity_at_once(make: Any) -> None:
    cache = make()
    grow_by([cache], 5000)
    assert rooms(appended(cache, 10)) == {5120}
    assert rooms(appended(cache, 4000)) == {5120}
    grow_by([cache], 512)
    assert rooms(appended(cache, 1500)) == {4010 + 1536}


def test_windows_and_states_do_not_grow() -> None:
    """Also one of an unknown class."""

    class Counting(KVCache):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

    layers = [RotatingKVCache(64), ChunkedKVCache(64), ArraysCache(2), Counting(), None]
    grow_by(layers, 5000)
    assert all("step" not in vars(layer) for layer in layers if layer is not None)
    window = appended(layers[0], 300)
    for _ in range(4):
        appended(window, 100)
    assert window.keys.shape[2] < 64 + 100


def row(tokens: int, room: int) -> KVCache:
    cache = KVCache()
    grow_by([cache], room)
    return appended(cache, tokens)


def test_batching_never_multiplies_the_capacity() -> None:
    """Unused capacity is kept or dropped when rows join, leave or are extracted."""
    group = KVCache.merge([row(100, 5000), row(90, 9000)])
    assert group.keys.shape[2] == 100
    new = mx.zeros((2, 2, 1, 64))
    group.update_and_fetch(new, new)
    spare = group.keys.shape[2]
    group.extend(KVCache.merge([row(95, 7000)]))
    assert group.keys.shape[2] == spare <= 101 + 256
    group.filter([0, 2])
    assert group.keys.shape[2] <= spare
    assert group.extract(0).keys.shape[2] == 101


@pytest.mark.parametrize(("prompt", "clears"), [(1000, 0), (5000, 1)])
def test_free_buffers_are_returned_after_a_long_prefill(
    prompt: int, clears: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    engine = new_engine(StandIn(), max_chunk=500)  # type: ignore[arg-type]
    run(engine, new_request([1] * prompt, max_tokens=2))
    assert len(cleared) == clears
