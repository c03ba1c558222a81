"""Prefix caches of ranks that keep unlike layers of the same rows: all have the same tree."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from mlx_lm.models.cache import ArraysCache

from agent_traffic import SyntheticModel
from mlx_provider.engine.heterogeneous import largest
from mlx_provider.engine.memory import MemoryProfile
from mlx_provider.engine.prefix_cache.cache import CacheKey, PrefixCache
from mlx_provider.engine.prefix_cache.key import as_ids
from mlx_provider.engine.prefix_cache.layer_kinds import Kind
from mlx_provider.engine.prefix_cache.tree import nodes

KEY = CacheKey("split")
BUDGET = 12_000
STEPS = 60


@dataclass
class Meeting:
    """Ranks as threads, of which one runs at a time; `most` waits until all have come."""

    ranks: int
    kind: Kind
    running: threading.Lock = field(default_factory=threading.Lock)
    told: list[Sequence[float]] = field(default_factory=list)
    found: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, self._compared, timeout=30)

    def most(self, own: Sequence[float]) -> list[float]:
        self.told.append(own)
        self.running.release()
        self.barrier.wait()
        self.running.acquire()
        return self.found

    def _compared(self) -> None:
        assert len(self.told) == self.ranks
        self.found = [max(each) for each in zip(*self.told, strict=True)]
        self.told = []

    def play(self, plays: Sequence[Callable[[], Any]]) -> list[Any]:
        def alone(play: Callable[[], Any]) -> Any:
            with self.running:
                return play()

        with ThreadPoolExecutor(self.ranks) as threads:
            return [each.result() for each in [threads.submit(alone, play) for play in plays]]


def traffic(model: SyntheticModel, meeting: Meeting) -> tuple[list[Any], int]:
    """What the tree of one rank looks like after each of many rows, and what it has evicted."""
    dice, seen = random.Random(5), []
    cache = PrefixCache(budget=lambda: BUDGET)
    texts = [[dice.randrange(1, 50) for _ in range(60)] for _ in range(6)]
    for _ in range(STEPS):
        ids = dice.choice(texts)[: dice.randrange(5, 60)] + [dice.randrange(50, 99)] * 3
        match = cache.match(KEY, ids, len(ids) - 1)
        row = cache.restore(match, model.make_cache)
        cold = model.make_cache()
        model.feed(cold, as_ids(ids), 0, match.length)
        assert _contents(row) == _contents(cold)
        end, snapshots = dice.randrange(match.length, len(ids)), {}
        model.feed(row, as_ids(ids), match.length, end)
        if end > match.length:
            inside = dice.random() < 0.3
            snapshot = cache.snapshot(row, inside=inside, heterogeneous=meeting)  # type: ignore[arg-type]
            snapshots = {} if snapshot is None else {end: snapshot}
        model.feed(row, as_ids(ids), end, len(ids))
        ahead = dice.random() < 0.3  # the last token was run ahead: a state alone does not show it
        kept = ids[: len(ids) - ahead]
        cache.insert(KEY, kept, row, snapshots, heterogeneous=meeting)  # type: ignore[arg-type]
        cache.check_integrity()
        held = [each for root in vars(cache)["_store"].roots.values() for each in nodes(root)]
        tree = [
            (n.start, n.stop, n.complete, n.snapshot is not None, n.nbytes, n.buffers, n.resumed)
            for n in held
        ]
        seen.append((match.length, cache.nbytes, tree))
        if dice.random() < 0.1:
            cache.evict_to(BUDGET // 2)
    return seen, cache.report()["evicted_bytes"]


def _contents(row: list[Any]) -> list[Any]:
    """What the next token can see."""
    seen: list[Any] = []
    for layer in row:
        if isinstance(layer, ArraysCache):
            seen.append([None if each is None else each.tolist() for each in layer.cache])
        elif layer.keys is None:
            seen.append([])
        else:
            window = getattr(layer, "max_size", None)
            keys = layer.keys[0, 0, : layer.offset, 0]
            if window:
                keys = layer._temporal_order(layer.keys)[0, 0, -min(window - 1, layer.offset) :, 0]
            seen.append(keys.tolist())
    return seen


@pytest.mark.parametrize(
    "kinds",
    [("kv", "hybrid"), ("kv", "window", "state"), ("window", "kv"), ("state", "kv")],
    ids=" ".join,
)
def test_ranks_with_unlike_layers_have_the_same_tree(kinds: tuple[Any, ...]) -> None:
    strictest = Kind.STATE if {"hybrid", "state"} & {*kinds} else Kind.WINDOW
    meeting = Meeting(len(kinds), strictest)
    models = [SyntheticModel(kind, window=16, state_units=4) for kind in kinds]
    played = meeting.play([lambda model=m: traffic(model, meeting) for m in models])
    (first, evicted), *others = played
    assert evicted > 0
    assert any(length for length, _, _ in first)
    for other, _ in others:
        assert other == first


def test_what_a_part_counts_for_is_the_most_of_any_rank() -> None:
    """A rank that keeps less than another evicts no later, and nothing it has is larger."""
    meeting = Meeting(2, Kind.STATE)
    models = [SyntheticModel(kind, state_units=4) for kind in ("hybrid", "state")]

    def kept(model: SyntheticModel) -> int:
        cache, row = PrefixCache(budget=lambda: 2**40), model.make_cache()
        model.feed(row, as_ids([1, 2, 3]), 0, 3)
        cache.insert(KEY, [1, 2, 3], row, {}, heterogeneous=meeting)  # type: ignore[arg-type]
        return cache.nbytes

    def own(model: SyntheticModel) -> int:
        cache, row = PrefixCache(budget=lambda: 2**40), model.make_cache()
        model.feed(row, as_ids([1, 2, 3]), 0, 3)
        cache.insert(KEY, [1, 2, 3], row, {})
        return cache.nbytes

    together = meeting.play([lambda model=m: kept(model) for m in models])
    assert together[0] == together[1] >= max(map(own, models))


def test_the_largest_profile_takes_at_least_what_each_does() -> None:
    profiles = [
        MemoryProfile(100, 0),
        MemoryProfile(0, 30, ((16, 8), (16, 8))),
        MemoryProfile(7, 12, ((16, 8), (64, 5))),
    ]
    found = largest(profiles)
    assert found == MemoryProfile(100, 30, ((16, 16), (64, 5)))
    for tokens in (1, 16, 40, 900):
        assert found.row_bytes(tokens) >= max(each.row_bytes(tokens) for each in profiles)
