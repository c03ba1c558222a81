"""The scheduler alone: no mlx, no model, a clock of our own."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_provider.engine.request import Phase, Request, Row, SamplingParams
from mlx_provider.engine.scheduling.scheduler import Budget, Limits, Scheduler
from mlx_provider.errors import BadRequest, Overloaded
from mlx_provider.protocol.event_queue import Mailbox
from mlx_provider.records import Prompt


class NoOutput:
    stopped = False
    reasoning_tokens = 0

    def push(self, token: int, logprob: object = None) -> list[object]:
        return []

    def finish(self, reason: str) -> tuple[list[object], str]:
        return [], reason


def make(length: int, max_tokens: int = 4, n: int = 1) -> Request:
    request = Request("r", Prompt([1] * length), SamplingParams(), max_tokens, Mailbox())
    request.rows = [Row(request, i, NoOutput()) for i in range(n)]  # type: ignore[arg-type]
    return request


def scheduler(
    max_rows: int = 4,
    max_queue: int = 100,
    memory: int = 10**9,
    max_chunk: int = 64,
    reserve: int = 8,
) -> Scheduler:
    limits = Limits(max_rows, max_queue, 0.1, max_chunk, reserve)
    budget = Budget(lambda tokens: tokens, lambda: memory, lambda need: None, lambda: memory)
    return Scheduler(limits, budget)


def test_images_keep_a_row_out_of_a_full_memory_but_never_the_only_one() -> None:
    beside = 0
    made = scheduler(memory=200)
    budget = dataclasses.replace(made.budget, beside=lambda: beside, row_bytes=lambda n: n)
    made = Scheduler(made.limits, budget)
    first, second = make(80), make(80)
    beside = 100
    for request in (first, second):
        made.check(request)
        made.submit(request, 0.0)
    chunk = made.next_chunk(0.0)
    assert chunk is not None, "its own images may be what is beside it"
    work = chunk.work
    work.done = len(work.tokens)
    made.join(work)
    assert made.next_chunk(0.0) is None
    beside = 10
    assert made.next_chunk(0.0) is not None


def test_it_imports_no_mlx() -> None:
    code = (
        "import sys, mlx_provider.engine.scheduling.scheduler\n"
        "sys.exit('mlx.core' in sys.modules or 'mlx_lm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WORK = st.lists(
    st.tuples(
        st.integers(0, 200),  # arrival step
        st.integers(1, 300),  # prompt
        st.integers(1, 40),  # max_tokens
        st.integers(1, 3),  # choices
        st.one_of(st.none(), st.integers(0, 100)),  # cancelled after so many steps
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=300)
@given(work=WORK, memory=st.integers(400, 2000), max_rows=st.integers(3, 8))
def test_budget_is_kept_nobody_starves_everyone_ends_once(
    work: list[tuple[int, int, int, int, int | None]], memory: int, max_rows: int
) -> None:
    plan = scheduler(max_rows=max_rows, memory=memory)
    requests = [(at, make(length, out, n), cancel) for at, length, out, n, cancel in work]
    requests = [r for r in requests if plan.reservation(r[1].rows) <= memory]
    ended: list[Request] = []
    step = 0
    while step <= 320 or not plan.idle:
        now = float(step)
        for at, request, cancel in requests:
            if at == step:
                plan.check(request)
                plan.submit(request, now)
            if cancel is not None and at + cancel == step and request.phase is not Phase.DONE:
                plan.drop(request)
                ended.append(request)
        advance_rows(plan, ended)
        while (row := plan.overflowing()) is not None:
            if plan.active_rows == 1:
                row.request.max_tokens = len(row.tokens)
                end(plan, row, ended)
            else:
                plan.preempt(row)
        chunk = plan.next_chunk(now)
        if chunk is not None:
            assert 0 < chunk.stop - chunk.start <= plan.limits.max_chunk
            chunk.work.done = chunk.stop
            if chunk.work.remaining == 0:
                plan.join(chunk.work)
        assert plan.live_bytes <= memory
        assert plan.active_rows <= max_rows
        step += 1
        assert step < 20_000, "somebody starves"
    assert sorted(map(id, ended)) == sorted(id(request) for _, request, _ in requests)


def test_what_never_fits_is_judged_by_the_model_alone() -> None:
    """Other models may leave: only what does not fit without them is the prompt's fault."""
    limits = Limits(4, 100, 0.1, 64, 8)
    budget = Budget(lambda tokens: tokens, lambda: 50, lambda need: None, lambda: 200)
    plan = Scheduler(limits, budget)
    plan.check(make(100))
    with pytest.raises(BadRequest, match="needs 304 bytes of cache; the memory limit leaves 200"):
        plan.check(make(300))


def test_the_last_row_waits_only_for_those_who_go_on_without_it() -> None:
    others = True
    budget = Budget(
        lambda tokens: tokens, lambda: 50, lambda need: None, lambda: 200, lambda: others
    )
    plan = Scheduler(Limits(4, 100, 0.1, 64, 8), budget)
    request = make(100)
    plan.running = list(request.rows)
    (row,) = request.rows
    assert plan.may_wait(row)
    others = False
    assert not plan.may_wait(row), "nobody would make room"
    others = True
    row.tokens = [1] * 150
    assert not plan.may_wait(row), "it has outgrown all there is"


def test_a_row_that_gets_room_by_asking_is_admitted() -> None:
    free = 50

    def reclaim(need: int) -> None:
        nonlocal free
        free = max(free, need)

    plan = Scheduler(
        Limits(4, 100, 0.1, 64, 8),
        Budget(lambda tokens: tokens, lambda: free, reclaim, lambda: 200),
    )
    plan.submit(make(100), 0.0)
    assert plan.next_chunk(0.0) is not None


def test_a_limit_that_shrinks_sends_the_youngest_back_until_the_others_fit() -> None:
    plan = scheduler(max_rows=10)
    limit = 10_000
    plan.budget = dataclasses.replace(plan.budget, available=lambda: limit)
    requests = [make(100) for _ in range(4)]
    for at, request in enumerate(requests):
        plan.submit(request, float(at))
        chunk = plan.next_chunk(float(at))
        while chunk is not None:
            chunk.work.done = chunk.stop
            if chunk.work.remaining == 0:
                plan.join(chunk.work)
            chunk = plan.next_chunk(float(at))
    assert plan.overflowing() is None
    limit = 2 * plan.reservation(requests[0].rows) + 1
    sent = []
    while (row := plan.overflowing()) is not None:
        sent.append(row.request)
        plan.preempt(row)
    assert sent == [requests[3], requests[2]]
    assert plan.live_bytes <= limit


def test_a_patient_prompt_does_not_stop_those_that_have_started() -> None:
    plan = scheduler(memory=300, max_rows=10)
    holder, patient = make(200, 1), make(150, 1)
    plan.submit(holder, 0.0)
    assert plan.next_chunk(0.0) is not None
    plan.submit(patient, 0.0)
    holder_work = next(w for w in plan.waiting if w.request is holder)
    holder_work.arrived = 1000.0
    chunk = plan.next_chunk(1000.0)
    assert chunk is not None
    assert chunk.work.request is holder


def advance_rows(plan: Scheduler, ended: list[Request]) -> None:
    for row in list(plan.running):
        row.tokens.append(0)
        if len(row.tokens) >= row.request.max_tokens:
            end(plan, row, ended)


def end(plan: Scheduler, row: Row, ended: list[Request]) -> None:
    row.finish = "length"
    plan.leave(row)
    if row.request.phase is Phase.DONE:
        ended.append(row.request)


def test_the_shortest_goes_first_and_the_long_one_is_not_starved() -> None:
    plan = scheduler(max_rows=1000, max_chunk=64)
    plan.chunk_time.per_token = 1 / 640
    long = make(640)
    plan.submit(long, now=0.0)
    served_at = None
    for step in range(400):
        plan.submit(make(60), now=float(step))
        chunk = plan.next_chunk(float(step))
        assert chunk is not None
        if chunk.work.request is long and served_at is None:
            served_at = step
        if step == 0:
            assert chunk.work.request is not long
        chunk.work.done = chunk.stop
        if chunk.work.remaining == 0:
            plan.join(chunk.work)
    assert served_at is not None
    assert long.phase is Phase.DECODE


def portions(plan: Scheduler, seconds: Callable[[int], float], count: int) -> list[int]:
    """Chunk sizes beside a row that decodes, on a device that takes `seconds(tokens)`."""
    first = make(10)
    plan.submit(first, 0.0)
    chunk = plan.next_chunk(0.0)
    assert chunk is not None
    chunk.work.done = 10
    plan.join(chunk.work)
    plan.submit(make(1_000_000), 0.0)
    sizes = []
    for _ in range(count):
        chunk = plan.next_chunk(0.0)
        assert chunk is not None
        sizes.append(chunk.stop - chunk.start)
        chunk.work.done = chunk.stop
        plan.measured(sizes[-1], seconds(sizes[-1]))
    return sizes


def test_a_chunk_stalls_running_rows_no_longer_than_the_target() -> None:
    plan = scheduler(max_chunk=2048)
    assert max(portions(plan, lambda tokens: tokens / 1000, 40)[20:]) in range(80, 101)


def test_a_chunk_takes_little_longer_than_a_decode_step() -> None:
    plan = scheduler(max_chunk=2048)
    plan.step_time.measured(0.02, rode=0)
    assert max(portions(plan, lambda tokens: tokens / 4000, 40)[20:]) in range(80, 101)


def test_chunks_do_not_shrink_where_most_of_their_time_is_fixed() -> None:
    """A device that reads its weights for 20 ms whatever it computes."""
    plan = scheduler(max_chunk=2048)
    plan.step_time.measured(0.02, rode=0)
    sizes = portions(plan, lambda tokens: 0.02 + tokens / 10_000, 60)[30:]
    assert max(sizes) in range(54, 61)  # 0.3 * 0.02 * 10_000


def test_the_smallest_chunks_still_teach_what_is_fixed() -> None:
    """Chunks of one size tell nothing: a disturbed time would never be corrected."""
    seen: list[int] = []

    def seconds(tokens: int) -> float:
        seen.append(tokens)
        return 0.005 * tokens if len(seen) < 40 else 0.02 + tokens / 10_000

    plan = scheduler(max_chunk=2048)
    plan.step_time.measured(0.02, rode=0)
    sizes = portions(plan, seconds, 160)
    assert max(sizes[20:40]) <= 16
    assert max(sizes[140:]) in range(50, 65)


def test_a_brief_prompt_is_not_cut_up() -> None:
    plan = scheduler(max_chunk=2048)
    plan.step_time.measured(0.02, rode=0)
    portions(plan, lambda tokens: 0.01 + tokens / 4000, 40)
    short = plan.submit(make(300), 0.0)
    short.cuts = (200,)
    assert [plan.portion(short).stop, len(short.tokens)] == [200, 300]
    short.done = 200
    assert plan.portion(short).stop == 300
    cached = plan.submit(make(10_000), 0.0)
    cached.expected = cached.done = 9_700
    assert plan.portion(cached).stop == 10_000
    longer = plan.submit(make(1000), 0.0)
    assert plan.portion(longer).stop in range(320, 361)  # 0.01 + 360 / 4000 = 0.1


def test_many_that_wait_may_delay_few_that_decode() -> None:
    plan = scheduler(max_rows=20, max_chunk=2048)
    plan.step_time.measured(0.02, rode=0)
    alone = max(portions(plan, lambda tokens: tokens / 4000, 40)[20:])
    for _ in range(4):
        long = plan.submit(make(5000), 0.0)
    several = {plan.portion(long).stop for plan.chunk_time.count in (40, 41)}
    assert max(several) >= 1.4 * alone


def test_one_slow_chunk_changes_little() -> None:
    plan = scheduler(max_chunk=2048)
    plan.step_time.measured(0.02, rode=0)
    sizes = portions(plan, lambda tokens: tokens / 4000, 40)
    plan.measured(sizes[-1], 3.0)
    chunk = plan.next_chunk(0.0)
    assert chunk is not None
    assert chunk.stop - chunk.start >= min(sizes[20:]) / 3


def rides(plan: Scheduler, seconds: Callable[[int], float], count: int) -> list[int]:
    """Tokens that ride in each step of three rows that decode, in steps of `seconds(tokens)`."""
    plan.may_ride = lambda work: work.done > 0
    first = plan.submit(make(10, n=3), 0.0)
    assert plan.next_chunk(0.0) is not None
    plan.join(first)
    long = plan.submit(make(1_000_000), 0.0)
    first_chunk = plan.next_chunk(0.0)
    assert first_chunk is not None
    assert not first_chunk.rides
    long.done = first_chunk.stop
    sizes = []
    for _ in range(count):
        chunk = plan.next_chunk(0.0)
        assert chunk is None or (chunk.rides and chunk.start == long.done)
        sizes.append(0 if chunk is None else chunk.stop - chunk.start)
        long.done += sizes[-1]
        plan.step_time.measured(seconds(sizes[-1]), rode=sizes[-1])
    return sizes


def test_as_many_tokens_ride_as_a_step_may_be_longer() -> None:
    sizes = rides(scheduler(), lambda tokens: 0.02 + tokens * 0.00025, 40)
    assert sizes[0] == 0, "how long a step takes by itself is measured first"
    assert {size for size in sizes[10:] if size} == {45}  # of 48, in whole tiles with the rows


def test_few_ride_where_each_costs_much_and_many_where_they_are_free() -> None:
    assert set(rides(scheduler(), lambda tokens: 0.02 + tokens * 0.01, 40)) == {0, 13}
    free = rides(scheduler(max_chunk=2048), lambda tokens: 0.02, 40)
    assert max(free) == 125  # 128 with the three rows


def test_a_chunk_that_may_be_long_has_a_pass_of_its_own() -> None:
    plan = scheduler(max_chunk=2048)
    rides(plan, lambda tokens: 0.02 + tokens * 0.0001, 40)
    for tokens in (600, 1000) * 20:
        plan.measured(tokens, tokens / 50_000)
    chunk = plan.next_chunk(0.0)
    assert chunk is not None
    assert not chunk.rides
    assert chunk.stop - chunk.start in range(900, 1001)


def test_rides_keep_to_the_stall_target() -> None:
    sizes = rides(scheduler(), lambda tokens: 0.5 + tokens * 0.004, 40)
    assert max(sizes[10:]) == 13  # 0.1 / 0.004, in whole tiles


def test_a_ride_that_was_disturbed_once_changes_little() -> None:
    seen: list[int] = []

    def seconds(tokens: int) -> float:
        seen.append(tokens)
        return 9.0 if len(seen) == 30 else 0.02 + tokens * 0.00025

    sizes = rides(scheduler(), seconds, 60)
    assert {size for size in sizes[50:] if size} == {45}


def test_steps_without_riders_are_measured_again_now_and_then() -> None:
    sizes = rides(scheduler(), lambda tokens: 0.02 + tokens * 0.0004, 200)
    assert 2 <= sizes[10:].count(0) <= 8


def test_a_step_that_cannot_be_measured_holds_nobody_back() -> None:
    plan = scheduler()
    plan.step_time.measured = lambda seconds, rode: None  # type: ignore[method-assign]
    sizes = rides(plan, lambda tokens: 0.02, 30)
    assert sizes[-20:] == [13] * 20


def test_chunks_end_at_cuts() -> None:
    plan = scheduler(max_chunk=64)
    request = make(100)
    plan.submit(request, 0.0).cuts = (30, 90)
    stops = []
    while request.phase is not Phase.DECODE:
        chunk = plan.next_chunk(0.0)
        assert chunk is not None
        stops.append(chunk.stop)
        chunk.work.done = chunk.stop
        if chunk.work.remaining == 0:
            plan.join(chunk.work)
    assert stops == [30, 90, 100]


def test_a_full_queue_says_how_long_it_is() -> None:
    plan = scheduler(max_queue=2)
    for _ in range(2):
        plan.submit(make(5), 0.0)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        plan.check(make(5))


def test_what_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(BadRequest, match="MLX_PROVIDER_MEMORY_LIMIT"):
        scheduler(memory=100).check(make(200))
    with pytest.raises(BadRequest, match="n=9"):
        scheduler(max_rows=8).check(make(1, n=9))


def test_a_prompt_that_does_not_fit_now_waits_and_lets_smaller_ones_pass() -> None:
    plan = scheduler(memory=300, max_rows=10)
    holder, big, small = make(200, 1), make(150, 1), make(20, 1)
    plan.submit(holder, 0.0)
    chunk = plan.next_chunk(0.0)
    assert chunk is not None
    chunk.work.done = 64
    plan.submit(big, 0.0)
    plan.submit(small, 0.0)
    started = set()
    for _ in range(8):
        chunk = plan.next_chunk(1.0)
        if chunk is None:
            break
        started.add(id(chunk.work.request))
        chunk.work.done = chunk.stop
        if chunk.work.remaining == 0:
            plan.join(chunk.work)
    assert id(small) in started
    assert id(big) not in started
    for row in list(plan.running):
        row.finish = "stop"
        plan.leave(row)
    chunk = plan.next_chunk(2.0)
    assert chunk is not None
    assert chunk.work.request is big
