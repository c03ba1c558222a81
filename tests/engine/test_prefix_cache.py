"""The prefix cache against a naive list of prefixes, on real cache objects with known contents."""

import gc
import shutil
import tempfile
import weakref
from math import inf
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from agent_traffic import SyntheticModel, in_order
from from_disk import flush, restored
from integrity import check_integrity
from mlx_provider.engine.prefix_cache.buffers import Reuse
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.disk import DiskTier
from mlx_provider.engine.prefix_cache.segments import Segment
from mlx_provider.engine.prefix_cache.tree import CacheKey, Match, as_ids, key_tokens, outside_spans
from mlx_provider.records import MediaSpan, Prompt
from schedules import Calls

KEY = CacheKey("model")
UNLIMITED = 2**60
PLAIN, HYBRID = SyntheticModel("kv"), SyntheticModel("hybrid", state_units=4)


def contents(cache) -> list:
    """The contents of a row cache, in token order, without unused capacity."""
    held = []
    for layer in cache:
        if isinstance(layer, KVCache):
            used = slice(0, layer.offset)
            held.append([np.array(a[0, 0, used, 0]) for a in (layer.keys, layer.values)])
        elif isinstance(layer, RotatingKVCache):
            # only the tokens that the next one attends to are guaranteed
            ordered = [in_order(layer, a) for a in (layer.keys, layer.values)]
            seen = min(layer.max_size - 1, layer.offset)
            held.append([np.array(a[0, 0, -seen:, 0]) for a in ordered] + [layer.offset])
        else:
            held.append([np.array(a) for a in layer.cache])
    return held


def same(a, b) -> bool:
    pairs = [
        (x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)
    ]
    return all(np.array_equal(x, y) for x, y in pairs)


def cold(model: SyntheticModel, ids, length: int, steps: int = 3) -> list:
    cache = model.make_cache()
    for start in range(0, length, steps):
        model.feed(cache, as_ids(ids), start, min(start + steps, length))
    return cache


def keep(prefix_cache, model, ids, ends=(), *, key=KEY, session=None, prompted=None) -> Match:
    """Serve `ids` as a prompt with message ends, and store all of it."""
    match = prefix_cache.match(key, ids, len(ids) - 1)
    cache = prefix_cache.acquire(match, model.make_cache)[0]
    at, states = match.length, {}
    for end in [e for e in (*sorted(ends), len(ids)) if e > at]:
        model.feed(cache, as_ids(ids), at, end)
        at = end
        state = prefix_cache.snapshot(cache)
        if state is not None:
            states[at] = state
    stored = prefix_cache.insert(key, ids, cache, states, reply_at=prompted, session=session)
    assert stored == prefix_cache.match(key, ids, len(ids)).shared
    return match


class CacheAgainstList(RuleBasedStateMachine):
    """After any operations, a restored row equals a cold one."""

    @initialize(
        layers=st.sampled_from(["kv", "window", "hybrid", "state"]),
        budget=st.sampled_from([UNLIMITED, 3000, 900]),
        disk=st.booleans(),
    )
    def start(self, layers, budget, disk) -> None:
        self.model = SyntheticModel(layers, window=6, state_units=5)
        self.calls = Calls()
        self.budget = budget
        self.folder = Path(tempfile.mkdtemp()) if disk else None
        self.open()
        self.whole = budget == UNLIMITED  # all stored rows are still in memory
        self.kept: dict[CacheKey, list[list[int]]] = {KEY: [], CacheKey("other"): []}
        self.pending: list[tuple[list[int], Match]] = []

    def open(self) -> None:
        disk = None if self.folder is None else DiskTier(self.folder, UNLIMITED, self.calls)
        self.prefix_cache = PrefixCache(budget=lambda: self.budget, disk=disk)

    @precondition(lambda self: self.folder)
    @rule()
    def restart(self) -> None:
        self.prefix_cache.close()
        self.open()
        self.whole = False

    def teardown(self) -> None:
        if hasattr(self, "prefix_cache") and self.folder is not None:
            self.prefix_cache.close()
            shutil.rmtree(self.folder)

    @rule(
        key=st.sampled_from([KEY, CacheKey("other")]),
        ids=st.lists(st.integers(1, 3), min_size=2, max_size=24),
        ends=st.sets(st.integers(1, 24), max_size=9),
        prompted=st.integers(1, 24),
        session=st.sampled_from([None, "a", "b"]),
    )
    def serve_one(self, key, ids, ends, prompted, session) -> None:
        limit = len(ids) - 1
        match = self.prefix_cache.match(key, ids, limit)
        known = self.kept[key]
        best = max((self.common(ids[:limit], path) for path in known), default=0)
        assert match.length <= match.shared <= best
        if self.whole:
            assert match.shared == best
            closest = [path for path in known if self.common(ids[:limit], path) == best]
            there = {path[best] for path in closest if len(path) > best and best < limit}
            assert match.diverged_at == (best if there else None)
        if self.model.layers == "kv" and self.whole:
            assert match.length == best
        self.compare(match, ids)
        kept = [end for end in ends if end < len(ids)]
        named = {"key": key, "session": session, "prompted": prompted}
        keep(self.prefix_cache, self.model, ids, kept, **named)
        known.append(ids)
        if self.roomy:  # the row just stored can be resumed at its end
            assert self.prefix_cache.match(key, [*ids, 9], len(ids)).length == len(ids)

    @property
    def roomy(self) -> bool:
        return self.budget == UNLIMITED

    @rule(ids=st.lists(st.integers(1, 3), min_size=2, max_size=24))
    def hold_a_match(self, ids) -> None:
        self.pending.append((ids, self.prefix_cache.match(KEY, ids, len(ids) - 1)))

    @precondition(lambda self: self.pending)
    @rule()
    def restore_a_held_match(self) -> None:
        ids, match = self.pending.pop(0)
        if self.prefix_cache.is_valid(match):
            self.compare(match, ids)
        else:
            with pytest.raises(ValueError, match="changed since the match"):
                self.prefix_cache.acquire(match, self.model.make_cache)[0]

    @precondition(lambda self: self.folder)
    @rule(
        key=st.sampled_from([KEY, CacheKey("other")]),
        ids=st.lists(st.integers(1, 3), min_size=2, max_size=24),
        grid=st.sampled_from([1, 4]),
    )
    def restore_from_disk(self, key, ids, grid) -> None:
        """Append-only layers are restored as far as they were ever stored, in memory or on disk."""
        flush(self.prefix_cache.disk)
        row, length = restored(self.prefix_cache, self.calls, self.model, key, ids, grid=grid)
        best = max((self.common(ids[:-1], path) for path in self.kept[key]), default=0)
        if self.model.layers == "kv":
            assert length // grid == best // grid
        self.compare_row(row, length, ids)

    @rule(share=st.floats(0, 1))
    def shrink(self, share) -> None:
        if self.folder is not None:
            flush(self.prefix_cache.disk)
        before = self.prefix_cache.nbytes
        target = int(before * share)
        freed = self.prefix_cache.evict(target)
        assert self.prefix_cache.nbytes == before - freed <= target
        self.whole = self.whole and not freed

    def compare(self, match: Match, ids) -> None:
        row = self.prefix_cache.acquire(match, self.model.make_cache)[0]
        self.compare_row(row, match.length, ids)

    def compare_row(self, row, length: int, ids) -> None:
        if length:
            assert same(contents(row), contents(cold(self.model, ids, length)))
            # the row continues, without effect on the prefix cache
            self.model.feed(row, as_ids(ids), length, len(ids))
            assert same(contents(row), contents(cold(self.model, ids, len(ids))))

    @staticmethod
    def common(a, b) -> int:
        count = 0
        while count < min(len(a), len(b)) and a[count] == b[count]:
            count += 1
        return count

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "prefix_cache"):
            check_integrity(self.prefix_cache)
            assert self.prefix_cache.nbytes <= self.budget


TestCacheAgainstList = CacheAgainstList.TestCase
TestCacheAgainstList.settings = settings(max_examples=40, stateful_step_count=15)


@pytest.fixture
def prefix_cache() -> PrefixCache:
    return PrefixCache(budget=lambda: UNLIMITED)


@pytest.mark.parametrize("layers", ["kv", "window", "hybrid", "state"])
def test_rows_of_one_match_change_neither_each_other_nor_the_store(prefix_cache, layers) -> None:
    model = SyntheticModel(layers, window=8, state_units=4)
    ids = list(range(1, 30))
    keep(prefix_cache, model, ids)
    match = prefix_cache.match(KEY, [*ids, 50, 51], 30)
    rows = [prefix_cache.acquire(match, model.make_cache)[0] for _ in range(2)]
    for row, token in zip(rows, (70, 80), strict=True):
        model.feed(row, as_ids([*ids, token, token]), 29, 31)
    for row, token in zip(rows, (70, 80), strict=True):
        assert same(contents(row), contents(cold(model, [*ids, token, token], 31)))
    again = prefix_cache.acquire(prefix_cache.match(KEY, [*ids, 50], 29), model.make_cache)[0]
    assert same(contents(again), contents(cold(model, ids, 29)))


def test_a_running_row_does_not_change_the_store(prefix_cache) -> None:
    """Upstream caches write in place, so a stored array must be a copy."""
    ids = list(range(1, 20))
    cache = cold(PLAIN, ids, 19)
    prefix_cache.insert(KEY, ids, cache, {})
    for layer in cache:
        layer.keys[...] = 0
    restored = prefix_cache.acquire(prefix_cache.match(KEY, [*ids, 1], 19), PLAIN.make_cache)[0]
    assert same(contents(restored), contents(cold(PLAIN, ids, 19)))


def test_only_used_tokens_are_counted(prefix_cache) -> None:
    """Upstream allocates 256 tokens at a time; ten tokens must not count as 256."""
    prefix_cache.insert(KEY, list(range(10)), cold(PLAIN, range(10), 10), {})
    assert prefix_cache.nbytes == 10 * 2 * 8 + 10 * 8


def test_shared_prefixes_are_stored_once(prefix_cache) -> None:
    keep(prefix_cache, PLAIN, [*range(1, 1001)])
    one = prefix_cache.nbytes
    keep(prefix_cache, PLAIN, [*range(1, 1001), 5000])
    keep(prefix_cache, PLAIN, [*range(1, 900), 6000])
    assert prefix_cache.nbytes == one + 2 * (one // 1000)


def test_tenants_and_models_never_share_prefixes(prefix_cache) -> None:
    keep(prefix_cache, PLAIN, [1, 2, 3, 4])
    for other in (CacheKey("model", salt="b"), CacheKey("adapter"), CacheKey("model", kv="8")):
        match = prefix_cache.match(other, [1, 2, 3, 4], 3)
        assert (match.length, match.shared, match.diverged_at) == (0, 0, None)


def test_a_hybrid_resumes_from_the_nearest_checkpoint(prefix_cache) -> None:
    ids = list(range(1, 41))
    keep(prefix_cache, HYBRID, ids, ends=[5, 25])
    match = prefix_cache.match(KEY, [*ids[:30], 99, 98], 31)
    assert (match.shared, match.length, match.diverged_at) == (30, 25, 30)
    assert prefix_cache.match(KEY, [*ids[:24], 99, 98], 25).length == 5
    assert prefix_cache.match(KEY, [*ids[:4], 99, 98], 5).length == 0


def resumable(prefix_cache, ids) -> list[int]:
    """Token counts at which a row can resume."""
    ends = range(1, len(ids) + 1)
    return [n for n in ends if prefix_cache.match(KEY, [*ids[:n], 500, 501], n).length == n]


def test_checkpoints_are_pruned_per_path(prefix_cache) -> None:
    ids = list(range(1, 201))
    keep(prefix_cache, HYBRID, ids, ends=range(20, 200, 20))
    # the system's end, and the last three
    assert resumable(prefix_cache, ids) == [20, 160, 180, 200]
    assert prefix_cache.report()["snapshots"] == 4
    check_integrity(prefix_cache)


def test_a_snapshot_close_behind_another_is_removed_when_the_path_continues(prefix_cache) -> None:
    ids = list(range(1, 201))
    keep(prefix_cache, HYBRID, ids[:53], ends=[20, 50])
    assert resumable(prefix_cache, ids[:53]) == [20, 50, 53]
    keep(prefix_cache, HYBRID, ids)
    assert resumable(prefix_cache, ids) == [20, 50, 200]
    check_integrity(prefix_cache)


def test_a_window_resumes_only_where_it_has_a_snapshot(prefix_cache) -> None:
    model = SyntheticModel("window", window=16)
    ids = list(range(1, 60))
    keep(prefix_cache, model, ids[:16])
    assert prefix_cache.match(KEY, [*ids[:7], 99], 7).length == 0
    cache = cold(model, ids, 7)
    early = prefix_cache.snapshot(cache)
    model.feed(cache, as_ids(ids), 7, 30)
    states = {7: early, 30: prefix_cache.snapshot(cache)}
    model.feed(cache, as_ids(ids), 30, 59)
    prefix_cache.insert(KEY, ids, cache, states)
    assert resumable(prefix_cache, ids) == [7, 30, 59]  # 16 is close behind 7
    assert prefix_cache.match(KEY, [*ids[:7], 99], 7).length == 7
    assert prefix_cache.match(KEY, [*ids[:35], 99], 35).length == 30
    assert prefix_cache.match(KEY, [*ids, 99], 59).length == 59


def test_another_image_ends_the_match_at_its_start(prefix_cache) -> None:

    def prompt(content: str, size: int = 8) -> list[int]:
        tokens = [1, 2, 3, *[99] * size, 4, 5, 6]
        return key_tokens(Prompt(tokens, spans=[MediaSpan(3, 3 + size, content, None)]))

    keep(prefix_cache, PLAIN, prompt("cat"))
    assert prefix_cache.match(KEY, prompt("cat"), 13).length == 13
    assert prefix_cache.match(KEY, prompt("dog"), 13).length == 3
    assert prefix_cache.match(KEY, prompt("cat", 9), 14).length == 3  # in another size
    keep(prefix_cache, PLAIN, prompt("cow", 9))
    assert prefix_cache.match(KEY, prompt("cow", 8), 13).length == 3
    for inside in range(4, 11):
        assert prefix_cache.match(KEY, prompt("cat"), inside).length == 3
    assert prefix_cache.match(KEY, prompt("cat"), 11).length == 11
    assert all(t >= 0 for t in prompt("cat")[:3] + prompt("cat")[-3:])


def test_neighbouring_images_keep_their_borders() -> None:
    spans = [MediaSpan(1, 4, "a", None), MediaSpan(4, 7, "a", None)]
    ids = as_ids(key_tokens(Prompt([0] * 8, spans=spans)))
    assert [outside_spans(ids, at) for at in range(9)] == [0, 1, 1, 1, 4, 4, 4, 7, 8]


def test_of_an_entry_larger_than_the_budget_the_part_that_fits_is_stored() -> None:
    prefix_cache = PrefixCache(budget=lambda: 2000)
    keep(prefix_cache, PLAIN, list(range(1, 41)))
    keep(prefix_cache, PLAIN, list(range(1000, 1200)))
    assert prefix_cache.nbytes == 83 * PLAIN.unit <= 2000
    assert prefix_cache.report()["refused"] == 0
    assert prefix_cache.match(KEY, list(range(1000, 1200)), 199).length == 83
    keep(prefix_cache, PLAIN, list(range(1000, 1300)))
    assert prefix_cache.match(KEY, list(range(1000, 1200)), 199).length == 83
    check_integrity(prefix_cache)


def test_an_entry_without_a_state_that_fits_is_refused() -> None:
    prefix_cache = PrefixCache(budget=lambda: 2000)
    model = SyntheticModel("hybrid", state_units=200)
    keep(prefix_cache, model, list(range(1, 41)))
    assert prefix_cache.nbytes == 0
    assert prefix_cache.report()["refused"] == 1


def test_entries_are_evicted_before_an_insertion() -> None:
    seen = []
    prefix_cache = PrefixCache(budget=lambda: seen.append(prefix_cache.nbytes) or 3000)
    for first in range(0, 10_000, 500):
        keep(prefix_cache, PLAIN, list(range(first + 1, first + 101)))
        check_integrity(prefix_cache)
    assert max(seen) <= 3000
    assert prefix_cache.nbytes > 2000


def one_size(first: int) -> list[int]:
    return list(range(first, first + 100))


def test_the_least_recently_used_entry_is_evicted_first(prefix_cache) -> None:
    for first in (1, 1000, 2000):
        keep(prefix_cache, PLAIN, one_size(first))
    keep(prefix_cache, PLAIN, one_size(1))
    prefix_cache.evict(prefix_cache.nbytes - 1)
    alive = [prefix_cache.match(KEY, one_size(first), 99).length for first in (1, 1000, 2000)]
    assert alive == [99, 0, 99]


def test_a_continued_conversation_outlives_a_newer_single_request(prefix_cache) -> None:
    keep(prefix_cache, PLAIN, one_size(1))
    keep(prefix_cache, PLAIN, list(range(1, 151)))
    keep(prefix_cache, PLAIN, list(range(1000, 1050)))
    prefix_cache.evict(prefix_cache.nbytes - 1)
    assert prefix_cache.match(KEY, list(range(1, 151)), 149).length == 149
    assert prefix_cache.match(KEY, list(range(1000, 1050)), 49).length == 0


def test_a_pinned_path_outlives_newer_ones(prefix_cache) -> None:
    keep(prefix_cache, PLAIN, one_size(1), session="s")
    for first in (1000, 2000, 3000):
        keep(prefix_cache, PLAIN, one_size(first))
    prefix_cache.evict(prefix_cache.nbytes // 4)
    assert prefix_cache.match(KEY, one_size(1), 99).length == 99
    # the pin moves with the session
    keep(prefix_cache, PLAIN, one_size(5000), session="s")
    keep(prefix_cache, PLAIN, one_size(6000))
    keep(prefix_cache, PLAIN, one_size(7000))
    prefix_cache.evict(prefix_cache.nbytes // 4)
    alive = [prefix_cache.match(KEY, one_size(first), 99).length for first in (1, 5000)]
    assert alive == [0, 99]
    check_integrity(prefix_cache)


def test_a_row_holds_its_whole_entry_where_the_head_of_another_session_ends_in_it() -> None:
    prefix_cache = PrefixCache(budget=lambda: 30 * PLAIN.unit)
    long, short = list(range(1, 21)), [100, 101]
    for name, ids in [("long", long), ("short", short)] * 2:  # both return
        keep(prefix_cache, PLAIN, ids, session=name)
    keep(prefix_cache, PLAIN, list(range(200, 208)))  # the cache is full
    ids = [*long[:16], 300, 301]
    row = cold(PLAIN, ids, len(ids))
    lease = Reuse(prefix_cache.totals, True, inf).lease_row(row)
    assert prefix_cache.insert(KEY, ids, row, {}, session="other", lease=lease) == len(ids)
    path = prefix_cache.match(KEY, ids, len(ids)).path
    assert [node.stop for node in path] == [10, 16, 18], "`long` keeps a third"
    assert {node.row for node in path} == {lease.row}, "no token is held twice"
    check_integrity(prefix_cache)


def test_a_row_is_charged_as_before_if_the_budget_cannot_be_asked() -> None:
    def budget() -> int:
        raise OSError("no budget")

    prefix_cache = PrefixCache(budget=budget)
    row = cold(PLAIN, range(1, 9), 8)
    lease = Reuse(prefix_cache.totals, True, inf).lease_row(row)
    with pytest.raises(OSError, match="no budget"):
        prefix_cache.insert(KEY, list(range(1, 9)), row, {}, lease=lease)
    assert lease.stored_bytes == 0


def test_evicted_memory_is_freed_although_its_session_is_remembered(prefix_cache) -> None:
    keep(prefix_cache, SyntheticModel("hybrid"), [1, 2, 3, 4], session="s")
    node = prefix_cache.match(KEY, [1, 2, 3, 4, 5], 4).path[-1]
    held = [weakref.ref(node.segment), weakref.ref(node.snapshot)]
    prefix_cache.evict(0)
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_tails_are_evicted_before_the_prefix_they_share(prefix_cache) -> None:
    shared = list(range(1, 200))
    for tail in range(4):
        keep(prefix_cache, PLAIN, [*shared, *one_size(1000 * (tail + 1))])
    prefix_cache.evict(prefix_cache.nbytes - 100 * 24 * 4 + 1)
    assert prefix_cache.match(KEY, [*shared, 7], 199).length == 199


def test_the_members_of_cache_lists_are_stored(prefix_cache) -> None:
    def make() -> list:
        return [CacheList(KVCache(), ArraysCache(1)), KVCache()]

    def feed(cache, values) -> None:
        for value in values:
            step = mx.full((1, 2, 1, 4), float(value))
            cache[0][0].update_and_fetch(step, step)
            cache[0][1][0] = mx.full((1, 3), float(value))
            cache[1].update_and_fetch(step, -step)

    cache = make()
    feed(cache, range(1, 6))
    prefix_cache.insert(KEY, range(1, 6), cache, {})
    row = prefix_cache.acquire(prefix_cache.match(KEY, range(1, 7), 5), make)[0]
    assert row[0][0].offset == row[1].offset == 5
    assert row[0][1][0].tolist() == [[5.0, 5.0, 5.0]]
    assert row[1].values[0, 0, :5, 0].tolist() == [-1, -2, -3, -4, -5]


class Opaque:
    """A cache of an unknown class with a plain state."""

    def __init__(self) -> None:
        self.total = None
        self.steps = 0
        self.extra = {"a": [None, (1, "x")]}


def test_a_cache_of_an_unknown_class_is_stored_whole(prefix_cache) -> None:
    cache = [KVCache(), Opaque()]
    cache[0].update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
    cache[1].total, cache[1].steps = mx.array([3.0]), 3
    prefix_cache.insert(KEY, [1, 2, 3], cache, {})
    cache[1].total[0] = 9
    row = prefix_cache.acquire(
        prefix_cache.match(KEY, [1, 2, 3, 4], 3), lambda: [KVCache(), Opaque()]
    )[0]
    assert (row[1].total.item(), row[1].steps, row[1].extra) == (3.0, 3, {"a": [None, (1, "x")]})
    assert prefix_cache.match(KEY, [1, 2, 9, 9], 3).length == 0


def test_a_cache_that_cannot_be_stored_is_refused_and_logged_once(prefix_cache, caplog) -> None:
    odd = Opaque()
    odd.extra = object()
    for _ in range(2):
        assert prefix_cache.snapshot([odd]) is None
        prefix_cache.insert(KEY, [1, 2], [odd], {})
    assert prefix_cache.nbytes == 0
    assert prefix_cache.report()["refused"] == 2
    assert len(caplog.records) == 1
    check_integrity(prefix_cache)


def test_a_row_of_another_dtype_is_refused(prefix_cache) -> None:
    keep(prefix_cache, PLAIN, [1, 2, 3])
    half = [KVCache(), KVCache()]
    for layer in half:
        layer.update_and_fetch(mx.ones((1, 1, 4, 1), mx.float16), mx.ones((1, 1, 4, 1), mx.float16))
    prefix_cache.insert(KEY, [1, 2, 3, 4], half, {})
    assert prefix_cache.match(KEY, [1, 2, 3, 4, 5], 4).length == 3


def test_an_insertion_that_fails_leaves_nothing(prefix_cache, monkeypatch) -> None:
    def fail(*args) -> None:
        raise RuntimeError("out of memory")

    def row(width: int) -> list:
        cache, array = KVCache(), mx.zeros((1, 1, 20, width))
        cache.update_and_fetch(array, array)
        return [cache]

    ids = list(range(20))
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "slice", fail)
        with pytest.raises(RuntimeError, match="memory"):
            prefix_cache.insert(KEY, ids, row(4), {})
    check_integrity(prefix_cache)
    assert prefix_cache.insert(KEY, ids, row(8), {}) == 20


def test_a_cache_with_too_few_tokens_is_an_error(prefix_cache) -> None:
    with pytest.raises(ValueError, match="holds 3 tokens, not 4"):
        prefix_cache.insert(KEY, [1, 2, 3, 4], cold(PLAIN, [1, 2, 3], 3), {})


def test_a_fresh_cache_of_another_kind_is_an_error(prefix_cache) -> None:
    keep(prefix_cache, PLAIN, [1, 2, 3])
    match = prefix_cache.match(KEY, [1, 2, 3], 2)
    with pytest.raises(ValueError, match="differs from the stored layer"):
        prefix_cache.acquire(match, lambda: [ArraysCache(1), KVCache()])[0]


def test_a_cache_with_more_tokens_than_its_key_is_cut_before_it_is_stored(prefix_cache) -> None:
    """During a step, append-only layers are cut, and states of a later token are not used."""
    ids = list(range(1, 13))
    for layers, usable in (("kv", 11), ("hybrid", 5)):
        key, model = CacheKey(layers), SyntheticModel(layers, state_units=4)
        cache = model.make_cache()
        model.feed(cache, as_ids(ids), 0, 5)
        state = prefix_cache.snapshot(cache)
        model.feed(cache, as_ids(ids), 5, 12)
        prefix_cache.insert(key, ids[:11], cache, {} if state is None else {5: state})
        match = prefix_cache.match(key, ids, 11)
        assert match.length == usable
        restored = prefix_cache.acquire(match, model.make_cache)[0]
        assert same(contents(restored), contents(cold(model, ids, usable)))


def test_the_report_counts_lookups_and_entries_and_clear_removes_all(prefix_cache) -> None:
    keep(prefix_cache, HYBRID, list(range(1, 11)), session="s")
    keep(prefix_cache, HYBRID, list(range(1, 21)))
    report = prefix_cache.report()
    assert report["lookups"] == 2
    assert report["prompt_tokens"] == 30
    assert report["reused_tokens"] == 10
    assert report["hit_rate"] == pytest.approx(1 / 3)
    assert (report["entries"], report["nodes"], report["sessions"]) == (1, 2, 1)
    prefix_cache.clear()
    assert prefix_cache.nbytes == 0
    assert prefix_cache.report()["nodes"] == 0
    check_integrity(prefix_cache)


def test_many_sessions_lose_the_oldest_pin(prefix_cache) -> None:
    for number in range(260):
        keep(prefix_cache, PLAIN, [number + 1, 2, 3], session=str(number))
    assert prefix_cache.report()["sessions"] == 256
    check_integrity(prefix_cache)


@pytest.mark.parametrize("layers", ["kv", "window", "hybrid"])
def test_buffers_are_bounded_however_few_bytes_they_have(layers) -> None:
    """Metal limits the number of live buffers; the least recently used ones are evicted."""
    prefix_cache = PrefixCache(budget=lambda: UNLIMITED, max_buffers=12)
    model = SyntheticModel(layers)
    for first in range(1, 40):
        ids = [first, *range(100, 120)]
        keep(prefix_cache, model, ids, [7])
        check_integrity(prefix_cache)
        assert prefix_cache.report()["buffers"] <= 12
        assert prefix_cache.match(KEY, [*ids, 5], 21).length == 21
    assert prefix_cache.match(KEY, [39, *range(100, 120)], 21).length
    assert not prefix_cache.match(KEY, [1, *range(100, 120)], 21).length
