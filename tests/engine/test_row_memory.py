"""What a row's cache allocates and copies, as MLX's allocator on a Mac would see it.

Only shapes matter, so a stand-in model appends tiny keys and values, and they are scaled up to an
8B model: 36 layers, 8 KV heads of 128, 16 bits, 4.6 GB of weights.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from types import SimpleNamespace
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

from mlx_provider import PrefillChunk
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.room import grown, growth
from mlx_provider.engine.row_cache import grow_by
from mlx_provider.testing.driver import new_engine, new_request, run

LAYERS, DIM, VOCAB = 4, 8, 16
TOKEN_BYTES = 8 * 128 * 2
"""Of the keys of one layer of the model that is stood in for; of its values, too."""
BUFFERS = 2 * 36
WEIGHTS = 4_600_000_000
PROMPT, RESERVE = 32_000, 512


@dataclass
class Pool:
    """MLX's buffer cache (0.32.2, backend/metal/allocator.cpp): a freed buffer is taken again only
    for a size within two pages of its own, or half of it."""

    page = 16_384
    limit: float = 46e9
    free: list[int] = field(default_factory=list)
    active: int = WEIGHTS
    peak: int = WEIGHTS
    fresh: int = 0

    def malloc(self, size: int) -> int:
        size = -(-size // self.page) * self.page
        at = bisect.bisect_left(self.free, size)
        if at < len(self.free) and self.free[at] < min(2 * size, size + 2 * self.page):
            size = self.free.pop(at)
        else:
            while self.free and self.active + sum(self.free) + size > self.limit:
                self.free.pop(0)
            self.fresh += size
        self.active += size
        self.peak = max(self.peak, self.active + sum(self.free))
        return size

    def give_back(self, size: int) -> None:
        self.active -= size
        bisect.insort(self.free, size)


@dataclass
class Replay:
    """Buffers of one row, sized up after each pass."""

    pool: Pool = field(default_factory=Pool)
    copied: int = 0
    room: int = 0
    held: list[int] = field(default_factory=list)

    def passed(self, cache: list[Any], before: int) -> None:
        rooms = {a.shape[2] for layer in cache for a in (layer.keys, layer.values)}
        (room,) = rooms
        if room == self.room:
            return
        old, self.held, self.room = self.held, [], room
        for at in range(BUFFERS):  # a layer's buffers are freed as the next layer allocates
            self.held.append(self.pool.malloc(room * TOKEN_BYTES))
            if old:
                self.copied += before * TOKEN_BYTES
                self.pool.give_back(old[at])


@dataclass
class StandIn:
    """A model of nothing but a cache."""

    replay: Replay = field(default_factory=Replay)
    info = SimpleNamespace(fingerprint="stand-in", vocab_size=VOCAB, stop_tokens=frozenset())
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special: "")

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in range(LAYERS)]

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        return self._pass(chunk.cache, chunk.stop - chunk.start)[0]

    def decode(self, tokens: mx.array, cache: list[Any], *_: Any) -> mx.array:
        return self._pass(cache, 1)

    def _pass(self, cache: list[Any], tokens: int) -> mx.array:
        before = cache[0].offset
        new = mx.ones((1, 1, tokens, DIM), mx.float16)
        mx.eval([layer.update_and_fetch(new, new) for layer in cache])
        self.replay.passed(cache, before)
        return mx.zeros((1, VOCAB))


@pytest.mark.parametrize("chunk", [2048, 320])
def test_a_cold_prefill_copies_nothing(chunk: int) -> None:
    model = StandIn()
    engine = new_engine(model, max_chunk=chunk, reserve=RESERVE)  # type: ignore[arg-type]
    engine.submit(new_request([1] * PROMPT, max_tokens=RESERVE))
    run(engine)
    kv = PROMPT * BUFFERS * TOKEN_BYTES
    assert model.replay.room >= PROMPT + RESERVE - 1
    assert model.replay.copied == 0
    assert model.replay.pool.peak <= 1.3 * (WEIGHTS + kv)
    assert model.replay.pool.fresh <= 1.05 * kv


def test_real_buffers_are_written_in_place() -> None:
    """MLX copies a buffer where anything else still refers to it."""
    model = StandIn()
    engine = new_engine(model, max_chunk=512, reserve=RESERVE)  # type: ignore[arg-type]
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    engine.submit(new_request([1] * PROMPT, max_tokens=20))
    run(engine)
    row = 2 * LAYERS * (PROMPT + 256) * DIM * 2
    assert mx.get_peak_memory() - before <= 1.1 * row


def test_a_row_after_a_prefix_hit_copies_nothing_more() -> None:
    model = StandIn()
    stored = PrefixCache(budget=lambda: 2**40)
    engine = new_engine(model, max_chunk=2048, reserve=RESERVE, prefix_cache=stored)  # type: ignore[arg-type]
    engine.submit(new_request([1] * 3000, max_tokens=2))
    run(engine)
    model.replay = Replay()
    again = new_request([1] * 9000, max_tokens=RESERVE)
    engine.submit(again)
    run(engine)
    assert again.cached > 2900
    assert model.replay.copied == 0
    assert model.replay.room == 9728


def test_a_reply_beyond_its_reserve_grows_seldom() -> None:
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


def test_growth_is_bounded_by_what_may_still_come() -> None:
    assert growth(1000, 1010) == 256
    assert growth(1000, 9000) == 1024
    assert growth(80_000, 120_000) == 10_240
    assert grown(1000, 9000, 1000) == 1000
    assert grown(1000, 9000, 1025) == 2048
    assert grown(1000, 1000, 1001) == 1024


def appended(cache: Any, tokens: int) -> Any:
    new = mx.random.normal((1, 2, tokens, 64))
    cache.update_and_fetch(new, new)
    return cache


def rooms(cache: Any) -> set[int]:
    keys = cache.keys if isinstance(cache.keys, tuple | list) else (cache.keys,)
    return {a.shape[2] for a in keys}


@pytest.mark.parametrize("make", [KVCache, QuantizedKVCache])
def test_plain_and_quantised_layers_get_their_room_at_once(make: Any) -> None:
    cache = make()
    grow_by([cache], 5000)
    assert rooms(appended(cache, 10)) == {5120}
    assert rooms(appended(cache, 4000)) == {5120}
    grow_by([cache], 512)
    assert rooms(appended(cache, 1500)) == {4010 + 1536}


def test_windows_and_states_stay_as_they_are() -> None:
    """Also one of a make that nobody knows."""

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


def test_batching_never_multiplies_the_room() -> None:
    """Joining, leaving and taking a row out drop or keep what is spare."""
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
def test_free_buffers_go_back_after_a_long_prefill(
    prompt: int, clears: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    engine = new_engine(StandIn(), max_chunk=500)  # type: ignore[arg-type]
    engine.submit(new_request([1] * prompt, max_tokens=2))
    run(engine)
    assert len(cleared) == clears
