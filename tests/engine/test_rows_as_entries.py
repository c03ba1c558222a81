"""A finished row becomes the entry for the next turn: counted bytes, and events in between."""

import gc
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from allocator_replay import StandIn
from failing import Failing, never
from integrity import check_integrity
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.buffers import Lease, Reuse
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.tree import ID_BYTES, CacheKey, segment_of
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.row_cache import profile
from mlx_provider.engine.scheduling.ledger import STEP_TOKENS, StepMemory, buffers_of
from mlx_provider.errors import BadRequest
from mlx_provider.families.text import TextModel
from mlx_provider.records import PrefillChunk, Prompt
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from mlx_provider.upstream.cache_classes import KVCache
from references import alone, assert_as_alone
from stepping import step_until, submit
from turns import TOKEN_BYTES, counted, measured

COMMON = [20 + i * i % 300 for i in range(120)]


def asked(engine: Engine, tokens: list[int], reply: int = 12, **more: Any) -> Request:
    request = new_request(tokens, max_tokens=reply, **more)
    run(engine, request)
    return request


def settled_memory() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def test_a_conversation_copies_only_when_it_outgrows_its_buffers() -> None:
    found = measured(in_place=True, turns=5, first=5000, each=800)
    assert [turn.cached for turn in found[1:]] == [turn.tokens for turn in found[:-1]]
    grown = [turn for turn in found if turn.copied]
    assert len(grown) <= 2, "the capacity doubles"
    assert found[0].copied == 0
    assert found[0].peak <= 1.15, "the entry of the prompt is no second copy of it"
    total = sum(turn.copied for turn in found)
    before = measured(in_place=False, turns=5, first=5000, each=800)
    assert total <= 0.2 * sum(turn.copied for turn in before)


def test_a_hit_within_the_capacity_copies_nothing() -> None:
    model: Any = StandIn()
    stored = PrefixCache(budget=lambda: 2**30)
    engine = new_engine(model, max_chunk=512, reserve=512, prefix_cache=stored)
    asked(engine, [1] * 3000)
    before = stored.nbytes
    with counted() as copies:
        assert asked(engine, [*[1] * 3000, 2, 3, 4]).cached_tokens == 3000
    assert copies.nbytes <= 16 * TOKEN_BYTES, "the reply that the prompt replaces"
    assert stored.nbytes - before <= 32 * (TOKEN_BYTES + 8), "one row, and the other reply"


def test_conversations_with_a_common_head_copy_nothing_else(qwen3: TextModel) -> None:
    """Each has the head in its own buffers, too, where it counts."""
    stored = PrefixCache(budget=lambda: 2**26)
    engine = new_engine(qwen3, prefix_cache=stored, reserve=12)
    head = COMMON[:20]
    talks = [[*head, *([60 + i] * 680)] for i in range(3)]
    for turn in range(3):
        for i, tokens in enumerate(talks):
            with counted() as copies:
                request = asked(engine, tokens)
            check_integrity(stored)
            token_bytes = segment_of(next(stored.nodes())).token_bytes
            assert copies.nbytes <= len(head) * token_bytes
            assert request.cached_tokens == (len(tokens) - 2 if turn else len(head) * (i > 0))
            assert_as_alone(qwen3, request)
            talks[i] = [*tokens, *output_of(request).tokens, 50, 51]
    rows = [*stored.totals.rows]
    assert sorted(row.path[0].start for row in rows) == [0, len(head), len(head)]
    allocated = sum(array.nbytes for row in rows for array in row.own_arrays)
    assert stored.nbytes == allocated + ID_BYTES * stored.report()["tokens"]


def test_both_branches_of_a_conversation_stay(qwen3: TextModel) -> None:
    stored = PrefixCache(budget=lambda: 2**26)
    engine = new_engine(qwen3, prefix_cache=stored)
    first = asked(engine, COMMON)
    whole = [*COMMON, *output_of(first).tokens, 60, 61]
    other = [*COMMON[:100], 70, 71, 72, 73]
    assert_as_alone(qwen3, asked(engine, whole), asked(engine, other))
    again = asked(engine, whole), asked(engine, other), asked(engine, [*other, 74, 75])
    assert [r.cached_tokens for r in again] == [len(whole) - 1, len(other) - 1, len(other)]
    assert_as_alone(qwen3, *again)


def test_a_row_is_released_once_the_ledger_counts_it_no_more(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its memory counts twice, and idle conversations lose their unused capacity for it."""
    stored, live = PrefixCache(budget=lambda: 2**26), list[int]()
    engine = new_engine(qwen3, prefix_cache=stored)
    release = stored.release

    def note(lease: Lease, **more: bool) -> None:
        release(lease, **more)
        live.append(engine.scheduler.live_bytes)

    monkeypatch.setattr(stored, "release", note)
    asked(engine, COMMON)
    submit(engine, *(new_request([70 + i] * 20, max_tokens=40) for i in range(2)), steps=6)
    ledger = engine.scheduler.ledger
    monkeypatch.setattr(ledger, "available_alone", ledger.available)
    monkeypatch.setattr(ledger, "available", lambda: -(2**30))
    engine.step()  # the first row ends, and the second is preempted
    assert live[-1] == 0


def test_sessions_of_different_tenants_with_one_name_are_different(qwen3: TextModel) -> None:
    stored = PrefixCache(budget=lambda: 2**26)
    engine = new_engine(qwen3, prefix_cache=stored)
    for salt in ("alice", "bob", "alice"):
        asked(engine, COMMON, session="main", salt=salt)
    assert stored.report()["sessions"] == 2


def test_a_part_that_is_evicted_frees_its_memory(qwen3: TextModel) -> None:
    stored = PrefixCache(budget=lambda: 2**26)
    engine = new_engine(qwen3, prefix_cache=stored, reserve=200)
    first = asked(engine, COMMON)
    asked(engine, [*COMMON, *output_of(first).tokens, 60, 61])
    whole, before = stored.nbytes, settled_memory()
    stored.evict(whole // 3)
    check_integrity(stored)
    assert before - settled_memory() >= (whole - stored.nbytes) * 0.8
    assert_as_alone(qwen3, asked(engine, COMMON))


@pytest.mark.parametrize("retried", [False, True])
def test_a_row_that_ends_with_its_first_token_is_an_entry(
    qwen3: TextModel, *, retried: bool
) -> None:
    stored = PrefixCache(budget=lambda: 2**26)
    fails_at = len(COMMON) if retried else -1
    model: Any = Failing(qwen3, lambda tokens, places: max(places) == fails_at)
    engine = new_engine(model, prefix_cache=stored, max_chunk=512)
    engine.submit(new_request([9] * 20, max_tokens=30))  # or the row would fail alone
    before = [*COMMON, *output_of(asked(engine, COMMON, reply=1 + retried)).tokens[:retried]]
    assert stored.in_use == 0
    gc.collect()
    fails_at = -1
    with counted() as copies:
        again = asked(engine, [*before, 60, 61])
    assert again.cached_tokens == len(before)
    assert copies.nbytes == 0
    assert_as_alone(qwen3, again)


def test_no_part_of_a_failed_row_becomes_an_entry(qwen3: TextModel) -> None:
    """But an entry of another row stays, also if the failed one had its head."""
    stored, other = PrefixCache(budget=lambda: 2**26), [*COMMON[:20], *([60] * 680)]
    model: Any = Failing(qwen3)
    engine = new_engine(model, prefix_cache=stored, max_chunk=512)
    asked(engine, COMMON), asked(engine, other)
    engine.submit(new_request(COMMON, max_tokens=12))
    step_until(engine, lambda: engine.scheduler.running)
    nodes, model.fails = {*stored.nodes()}, lambda tokens, places: True
    engine.step()
    model.fails = never
    engine.schedule(engine.clock())
    assert {*stored.nodes()} == nodes, "a decision drops nothing"
    again = asked(engine, COMMON), asked(engine, other)
    assert [request.cached_tokens for request in again] == [20, len(other) - 1]
    assert_as_alone(qwen3, *again)


PREFIX, TAIL, REPLY = [20 + i * i % 300 for i in range(700)], 6, 12


def tight(model: TextModel) -> tuple[Engine, PrefixCache, int]:
    """An engine with memory for one prefix and one step of eight tails; the bytes of a token."""
    row = model.make_cache()
    model.prefill(PrefillChunk(Prompt(PREFIX[:64]), 0, 64, row))
    memory = profile(row)
    each = memory.token_bytes
    room = each * (len(PREFIX) + 9 * STEP_TOKENS)
    stored = PrefixCache(budget=lambda: max(0, room - engine.scheduler.live_bytes))
    engine = new_engine(
        model, prefix_cache=stored, max_chunk=512, reserve=REPLY, min_shared=256, memory=memory,
        row_bytes=memory.row_bytes, available=lambda: room - stored.in_use,
    )  # fmt: skip
    vars(engine.scheduler.ledger).update(
        available_alone=lambda: room,
        reclaim=lambda need: stored.in_use + need <= room and stored.evict(room - need),
    )
    return engine, stored, each


def most_of(engine: Engine, stored: PrefixCache) -> tuple[int, int]:
    """The maximum number of rows, and the maximum bytes of rows with the entries that they use."""
    rows = nbytes = 0
    while not engine.idle:
        engine.step()
        rows = max(rows, engine.scheduler.active_rows)
        nbytes = max(nbytes, engine.scheduler.live_bytes + stored.in_use)
    return rows, nbytes


def test_memory_for_one_prefix_and_eight_tails_admits_eight_rows(qwen3: TextModel) -> None:
    """In the ledger and at admission, tokens that rows share count once."""
    engine, stored, each = tight(qwen3)
    requests = [
        new_request([*PREFIX, *(40 + (i * 31 + j) % 200 for j in range(TAIL))], max_tokens=REPLY)
        for i in range(8)
    ]
    for request in requests:
        engine.submit(request)
    rows, nbytes = most_of(engine, stored)
    assert rows == 8
    assert nbytes <= each * (len(PREFIX) + 9 * STEP_TOKENS)
    assert min(request.cached_tokens for request in requests[1:]) >= len(PREFIX) - 1
    assert_as_alone(qwen3, *requests)


def test_all_entries_behind_a_shared_prefix_can_be_evicted(qwen3: TextModel) -> None:
    """Also if the last one begins with a part of the prefix."""
    stored = PrefixCache(budget=lambda: 2**26)
    engine = new_engine(qwen3, prefix_cache=stored, max_chunk=512, min_shared=256)
    for last in (40, 41):
        engine.submit(request := new_request([*PREFIX, last, 50], max_tokens=60))
        step_until(engine, lambda: output_of(request).tokens)
    run(engine)
    asked(engine, [*PREFIX[:500], *range(60, 200)])
    assert sum(row.base is not None for row in stored.totals.rows) == 3
    stored.evict(0)
    check_integrity(stored)
    assert stored.nbytes == 0


def test_choices_become_entries_also_if_their_prompt_could_not(qwen3: TextModel) -> None:
    """Its rows share it, but no entry has their prefix."""
    room = 0
    stored = PrefixCache(budget=lambda: room)
    engine = new_engine(qwen3, layout="solo", prefix_cache=stored, max_chunk=512, min_shared=48)
    engine.submit(first := new_request(COMMON, max_tokens=12, n=2))
    step_until(engine, lambda: output_of(first).tokens)
    assert stored.nbytes == 0
    room = 2**26
    run(engine)
    again = asked(engine, [*COMMON, *output_of(first).tokens, 50])
    assert again.cached_tokens > len(COMMON)
    assert_as_alone(qwen3, again)
    stored.evict(0)
    assert stored.nbytes == 0


def test_eight_choices_take_the_memory_of_one_prompt(qwen3: TextModel) -> None:
    engine, stored, each = tight(qwen3)
    params = SamplingParams(temperature=1.0, seed=3)
    request = new_request([*PREFIX, *range(40, 40 + TAIL)], max_tokens=REPLY, n=8, params=params)
    engine.scheduler.check(request)
    with pytest.raises(BadRequest):  # without a prefix in common
        engine.scheduler.check(replace(request, echoed=True))
    engine.submit(request)
    rows, nbytes = most_of(engine, stored)
    assert rows == 8
    assert nbytes <= each * (len(PREFIX) + 9 * STEP_TOKENS)
    twin = alone(qwen3, request)
    for i in range(8):
        assert output_of(request, i).tokens == output_of(twin, i).tokens


@pytest.mark.parametrize(("n", "shared"), [(3, 1130), (4, 1130), (3, 600)])
def test_choices_behind_a_shared_prefix_reserve_what_they_take(
    qwen3: TextModel, n: int, shared: int
) -> None:
    """Four of them fit only without it, and so do three with more tokens of their own."""
    engine, stored, each = tight(qwen3)
    common, own = (PREFIX * 2)[:shared], (PREFIX * 2)[: 1500 - shared]
    for last in (40, 41):
        engine.submit(request := new_request([*common, last], max_tokens=60))
        step_until(engine, lambda request=request: output_of(request).tokens)
    run(engine)
    engine.submit(request := new_request([*common, *own], max_tokens=REPLY, n=n))
    reserve, offers = engine.scheduler.ledger.reservation, engine.scheduler.prefixes.offers
    claims = offers(engine.scheduler.waiting[0])
    assert len({*claims}) == n, "each row has its own"
    expected = reserve(request.rows, dict(zip(request.rows, claims, strict=True)))
    expected += sum(each.stored for each in buffers_of(claims))
    step_until(engine, lambda: request.rows[0] in engine.scheduler.running, most=100)
    assert reserve(request.rows) + stored.in_use <= expected
    assert most_of(engine, stored)[1] <= each * (len(PREFIX) + 9 * STEP_TOKENS)


def test_a_row_that_never_fits_alone_does_not_wait_forever(qwen3: TextModel) -> None:
    engine, _, _ = tight(qwen3)
    requests = [
        new_request([*PREFIX, *range(40 + i, 40 + i + TAIL)], max_tokens=120) for i in range(8)
    ]
    run(engine, *requests, max_steps=2000)
    assert {request.rows[0].finish for request in requests} == {"length"}


@pytest.mark.parametrize("cancelled", [False, True])
def test_rows_use_what_the_cache_counts(qwen3: TextModel, *, cancelled: bool) -> None:
    """While a row decodes, its prompt counts once, as part of the prefix cache."""
    stored = PrefixCache(budget=lambda: 2**26)
    engine = new_engine(qwen3, prefix_cache=stored, max_chunk=512, row_bytes=lambda n: 1024 * n)
    request = new_request(COMMON, max_tokens=30)
    engine.submit(request)
    step_until(engine, lambda: len(request.rows[0].tokens) >= 5)
    own = request.rows[0].lease
    assert own is not None
    assert own.stored_bytes == stored.in_use > 0
    alone_bytes = 1024 * (len(COMMON) + 30)
    assert engine.scheduler.live_bytes == alone_bytes - own.stored_bytes
    stored.evict(0)
    assert stored.in_use == own.stored_bytes == stored.report()["bytes"] - 8 * len(COMMON)
    if cancelled:
        engine.cancel(request)
    run(engine)
    assert stored.in_use == 0
    assert stored.evict(0) > 0
    assert stored.nbytes == 0
    assert_as_alone(qwen3, asked(engine, COMMON))


def test_a_prefix_that_admitted_a_prompt_is_kept_until_the_prompt_starts(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, stored, _ = tight(qwen3)
    asked(engine, PREFIX)
    start = engine.output.start
    monkeypatch.setattr(engine.output, "start", lambda each: (stored.evict(0), start(each)))
    again = asked(engine, [*PREFIX, 60, 61])
    assert again.cached_tokens == len(PREFIX)
    assert_as_alone(qwen3, again)


LONG = [20 + i * i % 300 for i in range(755)]


class Shrinking:
    """An engine whose memory limit can shrink."""

    def __init__(self, model: TextModel, least: int | None = None, layout: str = "grouped") -> None:
        row = model.make_cache()
        model.prefill(PrefillChunk(Prompt(LONG[:64]), 0, 64, row))
        self.memory = profile(row)
        self.room = 2**30
        self.stored = PrefixCache(budget=lambda: max(0, self.room - self.scheduler.live_bytes))
        self.engine = new_engine(
            model, layout=layout, prefix_cache=self.stored, max_chunk=512, reserve=16,
            row_bytes=self.memory.row_bytes, available=lambda: self.room - self.stored.in_use,
            min_shared=least,
        )  # fmt: skip
        self.scheduler = self.engine.scheduler
        vars(self.scheduler.ledger).update(available_alone=lambda: self.room, reclaim=self.reclaim)

    def reclaim(self, need: int) -> None:
        if self.stored.in_use + need <= self.room:
            self.stored.evict(self.room - need)

    def turn(self, before: Request, reply: int) -> Request:
        """Start the next turn of a conversation. It decodes."""
        tokens = [*before.prompt.tokens, *output_of(before).tokens, 60, 61]
        request = new_request(tokens, max_tokens=reply)
        self.engine.submit(request)
        while len(output_of(request).tokens) < 3:
            self.engine.step()
        assert request.cached_tokens == len(tokens) - 2
        return request


def test_a_single_row_frees_the_capacity_for_later_turns_before_it_is_preempted(
    qwen3: TextModel,
) -> None:
    own = Shrinking(qwen3)
    request = own.turn(asked(own.engine, LONG), reply=60)
    most = own.memory.row_bytes(len(request.prompt.tokens) + 60)
    assert own.scheduler.live_bytes + own.stored.in_use > most
    own.room = most
    run(own.engine)
    assert_as_alone(qwen3, request)


def test_capacity_for_later_turns_is_always_charged(qwen3: TextModel) -> None:
    """In the turn that allocated it, in the next turn, and after a row has used it."""
    own = Shrinking(qwen3)
    own.room = own.memory.row_bytes(3072)  # includes capacity for later turns
    request = asked(own.engine, LONG)
    for reply in (30, 500):
        request = own.turn(request, reply)
        held = request.rows[0].lease
        assert held is not None
        rooms = []
        while not own.engine.idle:
            (group,) = own.engine.batch.layout.groups
            rooms.append(max(layer.keys.shape[2] for layer in group.cache))
            charged = own.scheduler.live_bytes + own.stored.in_use
            charged //= own.memory.token_bytes
            about_to_grow = request.rows[0].length_to_cache >= rooms[-1]
            assert charged > rooms[-1] if about_to_grow else charged == rooms[-1]
            own.engine.step()
    assert rooms[0] == 1280
    assert rooms[-1] > rooms[0], "it grew beyond"


def test_only_one_choice_has_capacity_for_later_turns(qwen3: TextModel) -> None:
    own = Shrinking(qwen3, layout="solo")
    asked(own.engine, LONG)
    request = new_request([*LONG, *LONG[:300]], max_tokens=12, n=2)
    own.engine.submit(request)
    step_until(own.engine, lambda: len(own.scheduler.running) == 2)
    rooms = [group.cache[0].keys.shape[2] for group in own.engine.batch.layout.groups]
    assert rooms[0] > rooms[1] == own.scheduler.ledger.kv_needed(request.rows[1])


def test_another_prompt_can_use_the_memory_of_capacity_for_later_turns(qwen3: TextModel) -> None:
    own = Shrinking(qwen3)
    first = own.turn(asked(own.engine, LONG), reply=40)
    other = new_request(LONG[300:500], max_tokens=8)
    reserved = own.scheduler.ledger.reservation
    own.room = reserved(first.rows) + own.stored.in_use + reserved(other.rows) - 1
    own.stored.evict(0)
    own.engine.submit(other)
    own.engine.step()
    assert own.scheduler.active_rows == 2
    run(own.engine)
    assert_as_alone(qwen3, first, other)


def test_a_turn_uses_the_capacity_of_its_own_entry(qwen3: TextModel) -> None:
    own = Shrinking(qwen3)
    first = own.turn(asked(own.engine, LONG), reply=12)
    run(own.engine)
    tokens = [*first.prompt.tokens, *output_of(first).tokens, 62]
    whole = own.memory.row_bytes(len(tokens) + 12)
    assert own.stored.nbytes > whole
    own.room = whole
    again = asked(own.engine, tokens)
    assert again.cached_tokens == len(tokens) - 1
    assert_as_alone(qwen3, again)


def test_a_stored_reply_and_the_row_that_replaces_it_count_both(qwen3: TextModel) -> None:
    own = Shrinking(qwen3)
    asked(own.engine, LONG, reply=300)
    own.room = own.memory.row_bytes(1280) + ID_BYTES * 1280
    own.engine.submit(other := new_request([*LONG[:600], *LONG[:100]], max_tokens=12))
    while not own.engine.idle:
        own.engine.step()
        assert own.scheduler.live_bytes + own.stored.nbytes <= own.room
    assert_as_alone(qwen3, other)


def test_freed_capacity_behind_remaining_entries_is_counted(qwen3: TextModel) -> None:
    own = Shrinking(qwen3)
    own.turn(asked(own.engine, LONG), reply=12)
    run(own.engine)
    before, entries = own.stored.nbytes, set(own.stored.nodes())
    freed = own.stored.evict(0, keep=entries)
    assert entries == set(own.stored.nodes())
    assert freed == before - own.stored.nbytes > 0


def test_a_prompt_that_waits_keeps_its_stored_prefix(qwen3: TextModel) -> None:
    own = Shrinking(qwen3)
    asked(own.engine, PREFIX)
    own.engine.submit(first := new_request([*reversed(LONG)], max_tokens=60))
    while len(output_of(first).tokens) < 3:
        own.engine.step()
    reserved = own.scheduler.ledger.reservation(first.rows)
    own.room = reserved + own.stored.nbytes + own.memory.row_bytes(len(PREFIX)) // 4
    own.engine.submit(other := new_request([*PREFIX, *range(40, 340)], max_tokens=12))
    run(own.engine)
    assert other.cached_tokens == len(PREFIX)
    assert_as_alone(qwen3, first, other)


def test_no_more_rows_are_preempted_for_another_account_than_it_needs(qwen3: TextModel) -> None:
    """Without its row, an entry can be evicted."""
    own = Shrinking(qwen3, layout="solo")
    flood = [new_request([20 + i, *LONG[i:250]], max_tokens=60, tenant="a") for i in range(3)]
    for request in flood:
        own.engine.submit(request)
    while len(own.scheduler.running) < 3:
        own.engine.step()
    own.room = own.scheduler.live_bytes + own.stored.in_use
    own.engine.submit(other := new_request([9] * 250, max_tokens=12, tenant="b"))
    run(own.engine)
    assert sum(request.rows[0].gave_way for request in flood) == 1
    assert_as_alone(qwen3, *flood, other)


def test_a_prefix_that_is_stored_in_part_counts_whole_once_its_rows_have_ended() -> None:
    """A row took over an entry, and its longer prompt was not stored before it was divided."""
    stored, key = PrefixCache(budget=lambda: 2**26), CacheKey("")
    reuse = Reuse(stored.totals, True, 8)
    for tokens in (COMMON[:50], COMMON):
        found = stored.match(key, tokens, len(tokens) - 1)
        cache, lease = stored.acquire(found, lambda: [KVCache()], reuse=reuse)
        more = mx.zeros((1, 1, len(tokens) - found.length, 4))
        cache[0].update_and_fetch(more, more)
        assert lease is not None
        if tokens != COMMON:
            stored.insert(key, tokens, cache, {}, lease=lease)
            stored.release(lease)
    other, second = reuse.fork(lease, cache, 256)
    (prefix,) = stored.totals.rows
    assert prefix.is_prefix
    whole = prefix.capacity
    for each in (lease, second):
        assert each is not None
        stored.release(each, merged=each is second)
        assert prefix.capacity == whole, "a merged row reads all of it"
        stored.release(each)
        each.base = None
    del other
    allocated = sum(array.nbytes for array in prefix.own_arrays)
    assert allocated == prefix.stored + stored.totals.rows[prefix]
    assert prefix.capacity < whole


def test_what_a_victim_and_the_waiting_prompt_use_counts_once(qwen3: TextModel) -> None:
    """Preempting a row frees no entry that the prompt will use in place."""
    own = Shrinking(qwen3, least=64, layout="solo")
    flood = [new_request(tokens, max_tokens=60, tenant="a") for tokens in ([9] * 250, LONG)]
    rows = [request.rows[0] for request in flood]
    for row in rows:
        own.engine.submit(row.request)
        while not row.tokens:
            own.engine.step()
    own.engine.submit(new_request([*LONG, 50, 51], max_tokens=12, tenant="b"))
    memory = StepMemory(own.scheduler.ledger, own.scheduler.prefixes, rows)
    leases = own.scheduler.prefixes.offers(own.scheduler.waiting[0])
    assert buffers_of(leases) == buffers_of([rows[1].lease])
    freed = [-memory.newly_pinned(rows[n:], leases) for n in range(3)]
    assert freed == [0, rows[0].lease.stored_bytes, rows[0].lease.stored_bytes]
    assert -memory.newly_pinned((), ()) == own.stored.in_use
