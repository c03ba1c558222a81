"""The scheduler alone: no MLX, no model, a simulated clock."""

import dataclasses
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_provider.engine.request import Phase, Request, Row, SamplingParams
from mlx_provider.engine.scheduling.chunking import GRID, LITTLE_MORE, LONGEST_GAP, TAIL
from mlx_provider.engine.scheduling.costs import Costs, Curve, Load
from mlx_provider.engine.scheduling.ledger import Limits
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.engine.scheduling.step import TRIED_PER_STEP, Chunk, StepPlan, StepRecord
from mlx_provider.errors import BadRequest
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.records import MediaSpan, Prompt
from mlx_provider.testing.driver import TokenLedger


class NoOutput:
    stopped = ""
    reasoning_tokens = 0

    def push(self, token: int, logprob: object = None) -> list[object]:
        return []

    def finish(self, reason: str) -> tuple[list[object], str]:
        return [], reason


def make(length: int, max_tokens: int = 4, n: int = 1) -> Request:
    request = Request("r", Prompt([1] * length), SamplingParams(), max_tokens, EventQueue())
    request.rows = [Row(request, i, NoOutput()) for i in range(n)]  # type: ignore[arg-type]
    return request


A_MILLISECOND_EACH = Curve(((1, 0.001), (2000, 2.0)))


def scheduler(
    max_rows: int = 4,
    max_queue: int = 100,
    memory: int = 10**9,
    max_chunk: int = 64,
    reserve: int = 8,
    curve: Curve = A_MILLISECOND_EACH,
    **memory_of: Any,
) -> Scheduler:
    """`memory_of`: methods of the ledger."""
    limits = Limits(max_rows, max_queue, 0.1, max_chunk, reserve)
    ledger = TokenLedger(limits).give(**{"available": lambda: memory} | memory_of)
    return Scheduler(ledger, Costs(curve))


def next_chunk(plan: Scheduler, now: float = 0.0) -> Chunk | None:
    """The chunk of the next step, after admission."""
    record = decide(plan, now)
    return (decide(plan, now) if record.to_begin else record).plan.chunk


def some_chunk(plan: Scheduler, now: float = 0.0) -> Chunk:
    chunk = next_chunk(plan, now)
    assert chunk is not None
    return chunk


def apply(plan: Scheduler, record: StepRecord) -> None:
    for row in record.to_preempt:
        plan.preempt_row(row)
    plan.apply(record)


def decide(plan: Scheduler, now: float = 0.0) -> StepRecord:
    record = plan.schedule(now)
    apply(plan, record)
    for job in record.to_begin:
        job.cache = []
    return record


def ran(plan: Scheduler, chunk: Chunk) -> None:
    """Report the chunk as computed; rows decode after their whole prompt."""
    chunk.job.computed_tokens = chunk.stop
    plan.charge_chunk(chunk)
    if chunk.job.tokens_left == 0:
        plan.end_prefill(chunk.job)
        for row in chunk.job.rows:
            plan.add_row(row)


def test_images_keep_a_row_out_of_a_full_memory_but_never_the_only_one() -> None:
    beside = 0
    made = scheduler(memory=200, image_bytes=lambda: beside)
    first, second = make(80), make(80)
    beside = 100
    for request in (first, second):
        made.check(request)
        made.submit(request, 0.0)
    chunk = some_chunk(made)  # its own images may be what is beside it
    while chunk.job.tokens_left:
        chunk = some_chunk(made)
        ran(made, chunk)
    assert next_chunk(made) is None
    beside = 10
    assert next_chunk(made) is not None


def test_the_scheduler_imports_no_mlx() -> None:
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
        st.one_of(st.none(), st.integers(0, 100)),  # cancelled after this number of steps
    ),
    min_size=1,
    max_size=25,
)


@given(work=WORK, memory=st.integers(400, 2000), max_rows=st.integers(3, 8))
def test_the_budget_is_kept_and_every_request_ends_once(
    work: list[tuple[int, int, int, int, int | None]], memory: int, max_rows: int
) -> None:
    plan = scheduler(max_rows=max_rows, memory=memory)
    requests = [(at, make(length, out, n), cancel) for at, length, out, n, cancel in work]
    requests = [r for r in requests if plan.ledger.reservation(r[1].rows) <= memory]
    ended: list[Request] = []
    step = 0
    while step <= 320 or not plan.idle:
        now = float(step)
        for at, request, cancel in requests:
            if at == step:
                plan.check(request)
                plan.submit(request, now)
            if cancel is not None and at + cancel == step and request.phase is not Phase.DONE:
                plan.remove_request(request)
                ended.append(request)
        advance_rows(plan, ended)
        plan.charge_step(StepPlan(tuple(plan.running)))
        record = plan.schedule(now)
        assert record == plan.schedule(now), "deciding changes nothing"
        for row in record.to_end:
            assert plan.active_rows - len(record.to_preempt) == 1
            row.request.max_tokens = len(row.tokens)
            end(plan, row, ended)
        apply(plan, record)
        for job in record.to_begin:
            job.cache = []
        chunk = record.plan.chunk
        if chunk is not None:
            assert 0 < chunk.size <= plan.chunking.limits.max_chunk
            ran(plan, chunk)
        assert plan.live_bytes <= memory
        assert plan.active_rows <= max_rows
        step += 1
        assert step < 20_000, "somebody starves"
    assert sorted(map(id, ended)) == sorted(id(request) for _, request, _ in requests)


def test_a_prompt_is_refused_only_if_it_never_fits_without_other_models() -> None:
    """Other models can be unloaded, so that their memory is no reason to refuse a prompt."""
    plan = scheduler(memory=50, available_alone=lambda: 200)
    plan.check(make(100))
    with pytest.raises(BadRequest, match="needs 304 bytes of cache; the memory limit leaves 200"):
        plan.check(make(300))


def test_the_last_row_waits_only_for_rows_that_can_continue() -> None:
    others = True
    plan = scheduler(memory=50, available_alone=lambda: 200, others_go_on=lambda: others)
    request = make(100)
    plan.running = dict.fromkeys(request.rows)
    (row,) = request.rows
    assert plan.ledger.may_wait(row, 1)
    others = False
    assert not plan.ledger.may_wait(row, 1), "nobody would make room"
    others = True
    row.tokens = [1] * 150
    assert not plan.ledger.may_wait(row, 1), "it has outgrown all there is"


def test_a_row_is_admitted_if_others_give_back_memory() -> None:
    free = 50

    def reclaim(need: int) -> None:
        nonlocal free
        free = max(free, need)

    plan = scheduler(available=lambda: free, reclaim=reclaim, available_alone=lambda: 200)
    plan.submit(make(100), 0.0)
    assert decide(plan).to_admit is None
    assert free > 50, "memory is reclaimed for it"
    assert decide(plan).to_admit is not None


def test_memory_of_idle_models_is_free_for_rows() -> None:
    plan = scheduler(memory=50, unloadable=lambda need, pinned: 150)
    plan.submit(make(100), 0.0)
    record = plan.schedule(0.0)
    assert record.to_admit is not None
    need = plan.ledger.reservation(record.to_admit.rows)
    assert record.to_reclaim == need, "they are unloaded for it"


def test_memory_is_reclaimed_for_a_prompt_although_rows_are_counted_in_each_step() -> None:
    plan = beside_rows(scheduler(memory=500, available_alone=lambda: 9000), 1, 100)
    (row,) = plan.running
    row.tokens = [1] * 20
    plan.submit(make(800), 0.0)
    for _ in range(3):
        plan.charge_step(StepPlan(tuple(plan.running)))
        assert decide(plan).to_reclaim > 800


def test_idle_models_are_unloaded_for_rows_when_the_limit_falls() -> None:
    limit = 1000
    plan = scheduler(available=lambda: limit, unloadable=lambda need, pinned: 900)
    plan = beside_rows(plan, 3, 100)
    plan.charge_step(StepPlan(tuple(plan.running)))
    decide(plan)
    limit = 200
    record = decide(plan)
    assert record.to_reclaim > limit
    assert record.to_preempt == []


def test_a_lower_limit_preempts_the_youngest_rows_until_the_others_fit() -> None:
    limit = 10_000
    plan = scheduler(max_rows=10, available=lambda: limit)
    requests = [make(100) for _ in range(4)]
    for at, request in enumerate(requests):
        plan.submit(request, float(at))
        while (chunk := next_chunk(plan, float(at))) is not None:
            ran(plan, chunk)
    plan.charge_step(StepPlan(tuple(plan.running)))
    assert not decide(plan).to_preempt
    plan.submit(brief := make(8), 5.0)
    limit = 2 * plan.ledger.reservation(requests[0].rows) + plan.ledger.reservation(brief.rows) + 1
    record = decide(plan)
    assert [row.request for row in record.to_preempt] == [requests[3], requests[2]]
    assert record.to_admit is None, "these are considered before it"
    assert not record.to_end
    assert plan.live_bytes <= limit


def test_a_preempted_row_has_waited_since_it_was_queued() -> None:
    plan = scheduler()
    requests = [make(50) for _ in range(2)]
    requests[1].arrived = -1000.0  # its model had to load
    for at, request in enumerate(requests):
        plan.end_prefill(plan.submit(request, float(at)))
        plan.add_row(request.rows[0])
    jobs = [plan.preempt_row(request.rows[0]) for request in requests]
    assert plan.in_order(10.0, jobs[::-1]) == jobs
    assert {request.phase for request in requests} == {Phase.WAITING}


def test_no_row_is_preempted_for_a_prompt_that_waits_for_the_prefix_of_another() -> None:
    plan = beside_rows(scheduler(max_rows=3), 2)
    leader = plan.submit(make(1000), 0.0)
    decide(plan)
    request = make(1001)
    request.tenant = "another"
    job = plan.submit(request, 0.0)
    assert plan.schedule(0.0).to_preempt
    leader.ids, job.ids = np.arange(1000), np.arange(1001)
    record = plan.schedule(0.0)
    assert (record.to_preempt, record.to_admit) == ([], None)


@pytest.mark.parametrize(
    ("max_rows", "memory", "length", "preempted"),
    [(20, 1500, 600, 6), (20, 1500, 1000, 0), (14, 10**9, 5000, 1)],
)
def test_rows_give_way_only_while_their_tenant_keeps_as_much_memory(
    max_rows: int, memory: int, length: int, preempted: int
) -> None:
    plan = beside_rows(scheduler(max_rows=max_rows, memory=memory), 14, 100)
    request = make(length)
    request.tenant = "another"
    plan.submit(request, 0.0)
    assert len(plan.schedule(0.0).to_preempt) == preempted


def test_a_prompt_of_low_priority_does_not_stop_started_ones() -> None:
    plan = scheduler(memory=300, max_rows=10)
    holder, patient = make(200, 1), make(150, 1)
    plan.submit(holder, 0.0)
    assert next_chunk(plan) is not None
    plan.submit(patient, 0.0)
    assert some_chunk(plan, 1000.0).job.request is holder


def advance_rows(plan: Scheduler, ended: list[Request]) -> None:
    for row in list(plan.running):
        row.tokens.append(0)
        if len(row.tokens) >= row.request.max_tokens:
            end(plan, row, ended)


def end(plan: Scheduler, row: Row, ended: list[Request]) -> None:
    row.finish = "length"
    plan.remove_rows([row])
    if not row.request.unfinished_rows:
        plan.remove_request(row.request)
    if row.request.phase is Phase.DONE:
        ended.append(row.request)


def test_the_shortest_prompt_runs_first_and_a_long_one_does_not_starve() -> None:
    plan = scheduler(max_rows=1000, max_chunk=64, curve=Curve(((1, 1 / 640), (640, 1.0))))
    long = make(640)
    plan.submit(long, now=0.0)
    served_at = None
    for step in range(400):
        plan.submit(make(60), now=float(step))
        chunk = some_chunk(plan, float(step))
        if chunk.job.request is long and served_at is None:
            served_at = step
        if step == 0:
            assert chunk.job.request is not long
        ran(plan, chunk)
    assert served_at is not None
    assert long.phase is Phase.DECODE


@pytest.mark.parametrize("done", [640, 12_800, 19_200])
def test_a_new_prompt_never_waits_for_the_whole_of_another(done: int) -> None:
    """For any number of prefilled tokens of the other one."""
    plan = scheduler(max_rows=1000)
    long = plan.submit(make(20_000), now=0.0)
    for start in range(0, done, 64):
        assert next_chunk(plan, float(start)) == Chunk(long, start, start + 64)
        ran(plan, Chunk(long, start, start + 64))
    short = plan.submit(make(20), float(done))
    assert next_chunk(plan, float(done)) == Chunk(short, 0, 20)


def test_a_deep_prompt_is_no_brief_one() -> None:
    """Its passes take longer than those with as many tokens at a smaller depth."""
    curve = Curve(((1, 0.001), (64, 0.01)), ((1, 1e-6),))
    plan = scheduler(max_chunk=64, max_rows=1000, curve=curve)
    deep, other = plan.submit(make(20_000), 0.0), plan.submit(make(1000), 0.0)
    deep.estimated_cached = 19_500
    assert some_chunk(plan).job is other


def test_an_idle_device_takes_small_chunks_of_a_deep_prompt() -> None:
    """At this depth, larger chunks are hardly faster, and a new request would wait for them."""
    curve = Curve(((1, 0.002), (64, 0.01), (256, 0.03)), ((1, 7e-7), (256, 77e-6)))
    plan = scheduler(max_chunk=2048, curve=curve)
    job = plan.submit(make(60_000), 0.0)
    for depth in range(1024, 60_000, 1024):
        job.computed_tokens = depth
        assert plan.chunking.duration(job, some_chunk(plan).size) <= LONGEST_GAP


def beside_rows(plan: Scheduler, rows: int = 1, length: int = 10) -> Scheduler:
    """Add `rows` decoding rows."""
    job = plan.submit(make(length, n=rows), 0.0)
    decide(plan)
    ran(plan, Chunk(job, 0, length))
    return plan


def long_prompt(plan: Scheduler) -> None:
    plan.submit(make(1_000_000), 0.0)
    decide(plan)


CURVES = st.builds(
    lambda fixed, each, bend: Curve(
        ((1, fixed), *((n, fixed * bend + (n - 8) * each) for n in (8, 64, 256)))
    ),
    fixed=st.floats(0.001, 0.03),
    each=st.floats(1e-5, 1e-3),
    bend=st.floats(1, 2),
)  # fmt: skip


@pytest.mark.parametrize("saved", [None, -0.01])
@given(curve=CURVES, rows=st.integers(1, 4), mixes=st.booleans(), target=st.floats(0.04, 0.4))
def test_a_chunk_keeps_the_longest_gap_and_is_worth_its_pass(
    curve: Curve, rows: int, mixes: bool, target: float, saved: float | None
) -> None:
    """A chunk shares the pass of rows only if that is faster than two passes."""
    curve = dataclasses.replace(curve, saved=saved)
    plan = scheduler(max_rows=9, max_chunk=2048, curve=curve)
    plan.chunking.limits = dataclasses.replace(plan.chunking.limits, stall_target=target)
    long_prompt(beside_rows(plan, rows))
    step = plan.schedule(0.0, mixes=mixes, stalled=10.0).plan
    assert step.rows == tuple(plan.running)
    assert step.mixed == (mixes and saved is None)
    took = step.pass_seconds + step.chunk_seconds
    least = curve.seconds(rows) + curve.seconds(16)
    assert took <= max(target, LONGEST_GAP, LITTLE_MORE * least)
    half = step.chunk.size // 2
    if half >= 256:
        # a much smaller chunk would be slower for the prompt, because each pass has a fixed cost
        wide = curve.seconds(rows) + curve.seconds(half) - (curve.mixing if step.mixed else 0.0)
        assert step.chunk.size / took >= 0.99 * half / wide
    assert step.chunk.size >= 256 or curve.seconds(256) > 0.7 * LONGEST_GAP


@given(curve=CURVES, rows=st.integers(1, 4), mixes=st.booleans(), target=st.floats(0.001, 0.4))
def test_rows_get_their_tokens_within_the_stall_target_on_average(
    curve: Curve, rows: int, mixes: bool, target: float
) -> None:
    """For any duration of a chunk: the fewest steps without a chunk compensate for it."""
    plan = scheduler(max_rows=9, max_chunk=2048, curve=curve)
    plan.chunking.limits = dataclasses.replace(plan.chunking.limits, stall_target=target)
    long_prompt(beside_rows(plan, rows))
    steps = [run_step(plan, mixes) for _ in range(30)]
    fair = plan.chunking.fair(plan.chunking.seconds(list(plan.running)))
    chunks = [at for at, step in enumerate(steps) if step.chunk is not None]
    took = [step.pass_seconds + step.chunk_seconds for step in steps[: chunks[-1]]]
    assert sum(took) <= fair * len(took) * 1.001
    for at, after in pairwise(chunks):
        assert sum(took[at : after - 1]) > fair * (after - 1 - at) * 0.999 or after == at + 1


def run_step(plan: Scheduler, mixes: bool) -> StepPlan:
    """Run a step in which rows do not wait for a short prompt; no prompt becomes longer."""
    step = plan.schedule(0.0, mixes=mixes, stalled=10.0).plan
    plan.charge_step(step)
    return step


@pytest.mark.parametrize("mixes", [False, True])
def test_a_plan_that_lost_rows_or_its_chunk_takes_less_time(mixes: bool) -> None:
    plan = beside_rows(scheduler(max_chunk=2048), 3)
    long_prompt(plan)
    step = plan.schedule(0.0, mixes=mixes, stalled=10.0).plan
    plan.remove_rows(list(plan.running)[1:])
    left = plan.remaining_plan(step)
    chunk = step.chunk if mixes else None
    assert left.pass_seconds == plan.chunking.seconds(left.rows, chunk) < step.pass_seconds
    plan.waiting[0].restart()
    assert plan.remaining_plan(left).pass_seconds == plan.chunking.seconds(left.rows)
    plan.remove_rows(left.rows)
    assert plan.remaining_plan(left).pass_seconds == 0


def test_a_prompt_without_waiting_rows_leaves_no_debt() -> None:
    plan = scheduler(max_chunk=2048, curve=Curve(((1, 0.05), (16, 0.2), (64, 0.25))))
    long_prompt(beside_rows(plan))
    assert run_step(plan, mixes=True).chunk is not None
    assert run_step(plan, mixes=True).chunk is None
    plan.remove_rows(list(plan.running))
    assert run_step(plan, mixes=True).chunk is not None
    beside_rows(plan)
    assert run_step(plan, mixes=True).chunk is not None


@given(curve=CURVES)
def test_a_mixed_chunk_does_not_read_the_weights_again(curve: Curve) -> None:
    costs = Costs(curve)
    apart = costs.pass_of(1, 0) + costs.pass_of(0, 0, 256)
    assert costs.pass_of(1, 0, 256) == pytest.approx(apart - curve.seconds(1))


def test_an_image_has_a_separate_pass_and_text_after_an_image_is_mixed() -> None:
    plan = beside_rows(scheduler(max_chunk=32))
    request = make(1000)
    span = MediaSpan(100, 150, "image", None)
    request.prompt = dataclasses.replace(request.prompt, spans=[span])
    job = plan.submit(request, 0.0)
    decide(plan)
    assert plan.schedule(0.0, mixes=True).plan.prepared is job
    request.features["image"] = {}
    assert not plan.schedule(0.0, mixes=True).plan.mixed
    job.computed_tokens = 150
    assert plan.schedule(0.0, mixes=True).plan.mixed


def test_a_brief_prompt_is_not_cut_up() -> None:
    plan = beside_rows(scheduler(max_chunk=2048, curve=Curve(((1, 0.01), (301, 0.085)))))
    plan.submit(make(300), 0.0).cuts = (200,)
    stops = []
    while (chunk := next_chunk(plan)) is not None:
        stops.append(chunk.stop)
        ran(plan, chunk)
    assert stops == [200, 300]
    cached = plan.submit(make(10_000), 0.0)
    cached.estimated_cached = cached.computed_tokens = 9_700
    assert some_chunk(plan).stop == 10_000


def test_a_brief_prompt_precedes_rows_until_these_have_waited_for_the_longest_gap() -> None:
    plan = beside_rows(scheduler(max_chunk=2048))
    plan.submit(make(50), 0.0)
    decide(plan)
    assert not plan.schedule(0.0, stalled=0.0).plan.rows
    assert not plan.schedule(0.0, stalled=0.69).plan.rows
    assert plan.schedule(0.0, stalled=0.71).plan.rows
    plan.submit(make(50_000), 0.0)
    plan.remove_request(plan.waiting[0].request)
    decide(plan)
    assert plan.schedule(0.0, stalled=0.0).plan.rows, "a long one precedes nobody"


@pytest.mark.parametrize(
    ("least", "most", "curve"),
    [(256, 256, Curve(((1, 0.001), (1000, 1.0)))), (1000, 2048, Curve(((1, 0.6), (2000, 2.6))))],
)
def test_without_decoding_rows_a_chunk_takes_at_most_half_a_second_or_is_worth_its_pass(
    least: int, most: int, curve: Curve
) -> None:
    """A measured slow device takes 0.6 s for one token, 2.6 s for 2,000 tokens."""
    plan = scheduler(max_chunk=2048, curve=curve)
    long_prompt(plan)
    assert least <= plan.schedule(0.0).plan.chunk.size <= most


@pytest.mark.parametrize("kind", ["rows", "chunk"])
def test_the_points_of_a_curve_are_measured_anew_each_by_itself(kind: str) -> None:
    """Passes of 64 take three times as long as measured at load, those of 1 or 8 do not."""
    points = ((1, 0.01), (8, 0.02), (64, 0.1))
    costs = Costs(Curve(points, rows=points))
    pair = (lambda n: (n, 0)) if kind == "rows" else (lambda n: (0, 0, n))
    for _ in range(200):
        for width, seconds in ((64, 0.3), (1, 0.01), (64, 0.3), (8, 0.02)):
            load = Load(rows=width, keys=1) if kind == "rows" else Load(chunk=width)
            costs.update(costs.pass_of(*pair(width)), seconds, [load])
    for width, seconds in ((1, 0.01), (8, 0.02), (64, 0.3)):
        assert costs.pass_of(*pair(width)) == pytest.approx(seconds, rel=0.2)


def test_one_disturbed_pass_changes_little() -> None:
    costs = Costs(Curve(((1, 0.01), (256, 0.2))))
    for _ in range(20):
        costs.update(0.01, 0.01)
    costs.update(0.01, 9.0)
    assert costs.pass_of(1, 0) < 0.013
    costs.update(costs.pass_of(1, 0, 256), 9.0, [Load(rows=1, keys=1, chunk=256)])
    assert costs.pass_of(1, 0) < 0.013, "its chunk was slow"


def test_a_curve_runs_through_the_measurements_and_never_falls() -> None:
    curve = Curve.through({1: 0.01, 8: 0.009, 64: 0.04}, {1: 0.03, 64: 0.3}, 2000)
    assert [curve.seconds(n) for n in (1, 8, 64)] == [0.01, 0.01, 0.04]
    assert curve.seconds(120) == pytest.approx(0.07)
    costs = Costs(curve)
    assert costs.pass_of(0, 0, 64, 2000) == pytest.approx(0.3)
    assert costs.pass_of(1, 2000) == pytest.approx(0.03)
    assert curve.per_key(128) == pytest.approx(2 * curve.per_key(64)), "the most that it may be"
    assert Curve(curve.widths).per_key(64) == 0, "nothing is known of it"


@given(
    length=st.integers(1, 3000),
    cuts=st.lists(st.integers(1, 3000), max_size=4, unique=True).map(sorted),
    resumed=st.booleans(),
    slow=st.lists(st.floats(0.2, 5.0), min_size=110, max_size=110),
    rows=st.integers(0, 2),
)
def test_with_recurrent_state_no_pass_ends_at_a_measured_time(
    length: int, cuts: list[int], resumed: bool, slow: list[float], rows: int
) -> None:
    plan = scheduler(max_rows=9, max_chunk=512)
    plan.chunking.grid = GRID
    if rows:
        beside_rows(plan, rows)
    job = plan.submit(make(length), 0.0)
    job.cuts = [cut for cut in cuts if cut < length]
    if resumed and job.cuts:
        job.computed_tokens = job.cuts[0]
    decide(plan)
    for factor in slow:
        chunk = plan.schedule(0.0, stalled=10.0).plan.chunk
        if chunk is None:
            break
        assert chunk.stop % GRID == 0 or chunk.stop in (*job.cuts, length)
        assert length - chunk.stop >= TAIL or chunk.stop in (*job.cuts, length)
        ran(plan, chunk)
        plan.costs.update(1.0, factor)
    assert job.computed_tokens == length


def test_a_prompt_that_does_not_fit_now_waits_and_lets_smaller_ones_pass() -> None:
    plan = scheduler(memory=300, max_rows=10)
    holder, big, small = make(200, 1), make(150, 1), make(20, 1)
    plan.submit(holder, 0.0)
    some_chunk(plan).job.computed_tokens = 64
    plan.submit(big, 0.0)
    plan.submit(small, 0.0)
    started = set()
    for _ in range(8):
        chunk = next_chunk(plan, 1.0)
        if chunk is None:
            break
        started.add(chunk.job.request)
        ran(plan, chunk)
    assert small in started
    assert big not in started
    for row in list(plan.running):
        row.finish = "stop"
        plan.remove_rows([row])
    assert some_chunk(plan, 2.0).job.request is big


@pytest.mark.parametrize("waiting", [TRIED_PER_STEP - 1, TRIED_PER_STEP])
def test_a_step_tries_few_prompts_that_do_not_fit(waiting: int) -> None:
    plan = beside_rows(scheduler(memory=300, max_rows=10), 1, 200)
    for _ in range(waiting):
        plan.submit(make(150), 0.0)
    plan.submit(make(20), 20.0)
    assert (plan.schedule(20.0).to_admit is not None) == (waiting < TRIED_PER_STEP)


def test_the_memory_of_a_pass_is_reserved_once_for_all_rows() -> None:
    """The memory of the widest pass of the longest prompt; prompts wait for it, too."""
    plan = scheduler(memory=800, pass_bytes=lambda tokens, rows: 3 * tokens + rows)
    long, short = make(150), make(100)
    assert plan.ledger.reservation(long.rows) == 154 + 450 + 1
    assert plan.ledger.reservation([*long.rows, *short.rows]) == 154 + 104 + 450 + 2
    assert plan.ledger.reservation([]) == 0
    for request in (long, short, make(80)):  # each more urgent than the one before
        plan.submit(request, 0)
        assert decide(plan).to_admit
    assert plan.live_bytes == 154 + 104 + 84 + 450 + 3
    plan.submit(make(60), 0)
    assert not decide(plan).to_admit
    plan.check(make(190))
    with pytest.raises(BadRequest):
        plan.check(make(200))


def test_drafts_are_priced_at_the_depth_of_their_rows() -> None:
    """Attention over a long cache takes longer for several tokens of a row than for one."""
    curve = Curve(((1, 0.01), (32, 0.012)), ((1, 1e-7), (8, 5e-7)))
    chunking = scheduler(curve=curve).chunking
    short, deep = make(100).rows, make(60_000).rows
    little, much = (chunking.with_drafts(StepPlan(tuple(rows)))(7) for rows in (short, deep))
    assert little == pytest.approx(0.002 * 7 / 31 + 100 * 4e-7)
    assert much - little == pytest.approx(59_900 * 4e-7)
    assert chunking.with_drafts(StepPlan(tuple(deep)))(0) == 0
    assert chunking.with_drafts(StepPlan((*deep, *short)))(7) < much, "there are fewer for each row"


def test_the_time_of_drafting_measured_at_load_is_part_of_the_draft_price() -> None:
    curve = Curve(((1, 0.01), (32, 0.012)))
    rows = [*make(100).rows, *make(100).rows]
    measured = scheduler(curve=dataclasses.replace(curve, drafts=[(1, 0.001), (3, 0.002)])).chunking
    plain = scheduler(curve=curve).chunking
    for drafting, drafts, seconds in ((1, 3, 0.002), (2, 2, 0.002), (2, 6, 0.004), (2, 1, 0.001)):
        plan = StepPlan(tuple(rows[:drafting]))
        more = measured.with_drafts(plan)(drafts) - plain.with_drafts(plan)(drafts)
        assert more == pytest.approx(seconds)
