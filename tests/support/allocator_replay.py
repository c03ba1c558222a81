"""MLX's allocator on a Mac, fed with what a row's cache allocates and copies.

Only shapes matter, so a stand-in model appends tiny keys and values, and they are scaled up to an
8B model: 36 layers, 8 KV heads of 128, 16 bits, 4.6 GB of weights.
"""

import bisect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_provider.records import PrefillChunk
from mlx_provider.testing.driver import new_engine, new_request, run

LAYERS, DIM, VOCAB = 4, 8, 16
TOKEN_BYTES = 8 * 128 * 2
"""Of the keys of one layer of the model that is stood in for; of its values, too."""
BUFFERS = 2 * 36
TOKEN_ROW_BYTES = BUFFERS * TOKEN_BYTES
"""Of all its layers."""
WEIGHTS = 4_600_000_000


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


def cold_prefill(tokens: int, reserve: int, chunk: int) -> Replay:
    """What an engine allocates for a prompt of `tokens` and a reply as long as the reserve."""
    replay = Replay()
    model: Any = StandIn(replay)
    engine = new_engine(model, max_chunk=chunk, reserve=reserve)
    run(engine, new_request([1] * tokens, max_tokens=reserve))
    return replay
