"""Prefix caches of ranks with different layers of the same rows: all have the same tree."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from mlx_lm.models.cache import ArraysCache

from agent_traffic import LAYER_BYTES, SyntheticModel
from mlx_provider.engine.heterogeneous import largest
from mlx_provider.engine.memory import MemoryProfile
from mlx_provider.engine.prefix_cache.buffers import Holding, own_layers
from mlx_provider.engine.prefix_cache.cache import CacheKey, PrefixCache
from mlx_provider.engine.prefix_cache.key import as_ids
from mlx_provider.engine.prefix_cache.layer_kinds import Kind
from mlx_provider.engine.prefix_cache.tree import nodes
from mlx_provider.upstream.shared_kv import SharedRow, arrays_of

KEY = CacheKey("split")
BUDGET = 12_000
STEPS = 60
LEAST = 8


@dataclass
class Meeting:
    """Ranks as threads; one runs at a time. `most` waits for all ranks."""

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
    """The tree of one rank after each of many rows, and the bytes that it has evicted."""
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
        ahead = (
            dice.random() < 0.3
        )  # the last token was computed ahead, which a state does not show
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


@dataclass
class Rows:
    """The rows of one rank, in buffers of its prefix cache."""

    model: SyntheticModel
    meeting: Any = None
    charged: int | None = None
    cache: PrefixCache = field(default_factory=lambda: PrefixCache(budget=lambda: BUDGET))
    live: list[tuple[list[int], list[Any], Holding]] = field(default_factory=list)
    shared: int = 0

    def begin(self, ids: list[int], end: int) -> None:
        """Start a row with these tokens and a state at `end`."""
        match, cache = self.cache.match(KEY, ids, len(ids) - 1), self.cache
        if cache.prepare(match, least=LEAST):
            match = cache.match(KEY, ids, len(ids) - 1)
        row, holding = cache.resume(
            match, self.model.make_cache, room=9, least=LEAST, charged=self.charged
        )
        self.shared += holding.base is not None
        cold = self.model.make_cache()
        self.model.feed(cold, as_ids(ids), 0, match.length)
        assert _contents(row) == _contents(cold)
        end, states = max(end, match.length), {}
        self.model.feed(row, as_ids(ids), match.length, end)
        state = cache.snapshot(row, heterogeneous=self.meeting)
        if end > match.length and state is not None:
            states = {end: state}
        self.model.feed(row, as_ids(ids), end, len(ids))
        self.store(ids, row, holding, states)
        self.live.append((ids, row, holding))

    def end(self, at: int, more: list[int]) -> None:
        """End a row after these tokens."""
        ids, row, holding = self.live.pop(at)
        self.model.feed(row, as_ids(ids + more), len(ids), len(ids + more))
        self.store(ids + more, row, holding, {})
        self.cache.give_back(holding)

    def store(self, ids: list[int], row: list[Any], holding: Holding, states: Any) -> None:
        self.cache.insert(KEY, ids, row, states, heterogeneous=self.meeting, holding=holding)
        self.cache.check_integrity()

    def seen(self) -> tuple[Any, ...]:
        """The values that must be equal on all ranks."""
        store = vars(self.cache)["_store"]
        held = [
            (
                n.start,
                n.stop,
                n.nbytes,
                n.buffers,
                n.needed,
                n.segment.held and n.segment.held.number,
            )
            for root in store.roots.values()
            for n in nodes(root)
        ]
        rows = [(each.capacity, each.stored) for _, _, each in self.live]
        return self.shared, self.cache.nbytes, self.cache.in_use, held, rows


def rows_in_place(model: SyntheticModel, meeting: Meeting) -> tuple[list[Any], Rows]:
    """The rows and the tree of one rank after each of many steps."""
    dice, seen = random.Random(3), []
    own = LAYER_BYTES * len(own_layers(model.make_cache()))
    rows = Rows(model, meeting, int(meeting.most([own])[0]))
    texts = [[dice.randrange(1, 50) for _ in range(long)] for long in (60, 60, 9, 9)]
    for _ in range(STEPS):
        ids = dice.choice(texts)[: dice.randrange(9, 60)] + [dice.randrange(50, 99)] * 3
        rows.begin(ids, dice.randrange(len(ids)))
        if dice.random() < 0.2:
            rows.cache.trim(rows.live[-1][2].own, 40)  # type: ignore[arg-type]
        while len(rows.live) > 3 or (rows.live and dice.random() < 0.4):
            rows.end(dice.randrange(len(rows.live)), [dice.randrange(99)] * dice.randrange(1, 9))
        if dice.random() < 0.1:
            rows.cache.evict_to(BUDGET // 4)
        seen.append(rows.seen())
    return seen, rows


def _contents(row: list[Any]) -> list[Any]:
    """The keys and values that the next token attends to."""
    seen: list[Any] = []
    for layer in row:
        if isinstance(layer, SharedRow):
            keys = [arrays_of(layer)[0][..., : layer.offset, :]]
            seen.append([key for each in keys for key in each[0, 0, :, 0].tolist()])
        elif isinstance(layer, ArraysCache):
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
def test_ranks_with_different_layers_have_the_same_tree(kinds: tuple[Any, ...]) -> None:
    strictest = Kind.STATE if {"hybrid", "state"} & {*kinds} else Kind.WINDOW
    meeting = Meeting(len(kinds), strictest)
    models = [SyntheticModel(kind, window=16, state_units=4) for kind in kinds]
    played = meeting.play([lambda model=m: traffic(model, meeting) for m in models])
    (first, evicted), *others = played
    assert evicted > 0
    assert any(length for length, _, _ in first)
    for other, _ in others:
        assert other == first


@pytest.mark.parametrize(
    "kinds", [("kv", "hybrid"), ("window", "kv", "hybrid"), ("window", "kv")], ids=" ".join
)
def test_ranks_with_different_layers_share_the_same_prefixes(kinds: tuple[Any, ...]) -> None:
    meeting = Meeting(len(kinds), Kind.STATE if "hybrid" in kinds else Kind.WINDOW)
    models = [SyntheticModel(kind, window=16, state_units=4) for kind in kinds]
    played = meeting.play([lambda model=m: rows_in_place(model, meeting) for m in models])
    (first, rows), *others = played
    assert rows.shared > 5
    assert rows.cache.report()["evicted_bytes"] > 0
    for other, _ in others:
        assert other == first


def test_another_rank_keeps_the_buffers_that_a_prompt_will_use_on_rank_0() -> None:
    """Only rank 0 knows prompts before their admission."""
    ranks = [Rows(SyntheticModel("kv")) for _ in range(2)]
    ids = list(range(1, 40))
    for rank in ranks:
        rank.begin(ids, 1)
        rank.end(0, [])
    leader, follower = (rank.cache for rank in ranks)
    claim = leader.claim(leader.match(KEY, [*ids, 5], len(ids)), least=LEAST)
    assert claim is not None
    assert follower.evict_to(0, leader.claimed) == leader.evict_to(0)
    assert follower.nbytes == leader.nbytes > 0
    del claim
    assert follower.evict_to(0, leader.claimed) == leader.evict_to(0) > 0


def test_a_part_counts_with_the_largest_bytes_of_any_rank() -> None:
    """A rank with smaller parts must evict at the same time as a rank with larger ones."""
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


def test_the_common_memory_profile_is_at_least_that_of_each_rank() -> None:
    profiles = [
        MemoryProfile(100, 0),
        MemoryProfile(0, 30, ((16, 8), (16, 8))),
        MemoryProfile(7, 12, ((16, 8), (64, 5))),
    ]
    found = largest(profiles)
    assert found == MemoryProfile(100, 30, ((16, 16), (64, 5)))
    for tokens in (1, 16, 40, 900):
        assert found.row_bytes(tokens) >= max(each.row_bytes(tokens) for each in profiles)
