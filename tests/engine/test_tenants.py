"""Tenants share the device: in simulated steps on curves of devices, and with a real model."""

import pytest

from mlx_provider.engine.request import PrefillJob
from mlx_provider.engine.scheduling.step import above_share
from mlx_provider.errors import Overloaded
from mlx_provider.families.text import TextModel
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from references import assert_as_alone
from schedules import guessing
from simulated_engine import Engine, m3_max
from stepping import step_until, submit

LONG, SHORT = 8_000, 500
"""Tokens of a prompt of the flood, and of the one that waits."""
REPLY = 200
WARM = 12
"""Prompts of the flood that have run before the short one comes."""


def laptop(memory: int = 8 * (LONG + REPLY)) -> Engine:
    return Engine(m3_max(), memory=memory, queue=1000, reserve=REPLY)


def wait(others: int) -> float:
    """Seconds to the first token of a short prompt, beside `others` of another tenant. It comes in
    the middle of a long prompt: the only one, or after those that filled the memory."""
    run = laptop()
    jobs = [run.submit(LONG, REPLY, tenant="a") for _ in range(others)]
    while served(jobs) < LONG * (min(WARM, others - 1) + 0.5):
        run.step()
    came = run.now
    return run.until(run.ask(SHORT, REPLY, tenant="b")).now - came


def test_a_flood_delays_another_account_at_most_twice_as_long_as_one_prompt() -> None:
    assert wait(20) <= 2 * wait(1)


def test_two_floods_share_the_device_by_tokens_while_both_run() -> None:
    run = laptop()
    jobs = {"a": [run.submit(LONG, 1, tenant="a") for _ in range(20)]}
    while served(jobs["a"]) < 5 * LONG:
        run.step()
    jobs["b"] = [run.submit(LONG, 1, tenant="b") for _ in range(20)]
    before = served(jobs["a"])
    while served(jobs["b"]) < 4 * LONG:
        run.step()
    assert served(jobs["a"]) - before == pytest.approx(served(jobs["b"]), abs=LONG)


def served(jobs: list[PrefillJob]) -> int:
    return sum(job.computed_tokens for job in jobs)


def test_an_account_with_a_larger_share_gets_more() -> None:
    run = laptop(memory=10**9)
    jobs = {
        share: [run.submit(LONG, 1, tenant=f"{share}", share=share) for _ in range(9)]
        for share in (1, 3)
    }
    for _ in range(300):
        run.step()
    assert served(jobs[1]) > LONG
    assert served(jobs[3]) == pytest.approx(3 * served(jobs[1]), abs=1.5 * LONG)


def test_a_prompt_of_a_larger_share_counts_as_a_shorter_one() -> None:
    run = laptop()
    run.ask(SHORT, REPLY, tenant="a")
    longer = run.submit(2 * SHORT, REPLY, tenant="b", share=4)
    while not longer.computed_tokens:
        run.step()
    assert not run.first


def test_long_prompts_of_one_account_run_although_short_ones_of_another_never_end() -> None:
    run = laptop()
    long, ahead = run.submit(LONG, REPLY, tenant="a"), run.ask(SHORT, 1, tenant="b")
    for _ in range(LONG // SHORT + 2):
        ahead, now = run.ask(SHORT, 1, tenant="b"), ahead
        run.until(now)
    assert not long.tokens_left


def test_each_account_keeps_one_row() -> None:
    requests = [new_request([1], tenant=tenant) for tenant in "aaabbc"]
    for at, request in enumerate(requests):
        request.arrived = float(at)
    rows = [request.rows[0] for request in requests]
    assert list(above_share(rows)) == [rows[2], rows[1], rows[4]]


def test_a_full_queue_takes_a_request_of_an_account_without_waiting_requests() -> None:
    run = laptop()
    for _ in range(1000):
        run.ask(9, REPLY, tenant="a")
    for tenant in "bc":
        run.scheduler.check(new_request([1], tenant=tenant))
    with pytest.raises(Overloaded):
        run.scheduler.check(new_request([1], tenant="a"))
    with pytest.raises(Overloaded):
        run.scheduler.check(new_request([1], tenant="b"), arriving=["a"] * 250)
    with pytest.raises(Overloaded):  # its own tenant has waiting requests
        run.scheduler.check(new_request([1], tenant="b"), arriving=["b"])


def test_tokens_of_accepted_drafts_count_as_much_as_others(qwen3: TextModel) -> None:
    drafting, plain = (
        new_request([5, 6, at], max_tokens=60, tenant=tenant, drafts=tenant == "a")
        for at, tenant in enumerate("ab")
    )
    engine = new_engine(qwen3, speculation=guessing(qwen3, [drafting], 1.0))
    submit(engine, drafting, plain)
    step_until(engine, lambda: len(output_of(drafting).tokens) >= 50)
    assert len(output_of(plain).tokens) < 40
    for tenant in "ab":
        engine.submit(new_request([7] * 9, tenant=tenant))
    first, _ = engine.scheduler.in_order(0.0, engine.scheduler.waiting)
    assert first.request.tenant == "b", "it was served less"


@pytest.mark.parametrize("full", ["rows", "memory"])
def test_a_preempted_row_continues_with_the_same_tokens(qwen3: TextModel, full: str) -> None:
    limits = {"max_rows": 3} if full == "rows" else {"available": lambda: 180, "reserve": 40}
    engine = new_engine(qwen3, **limits)
    flood = [new_request([5, at, 7], max_tokens=40, tenant="a") for at in range(8)]
    submit(engine, *flood, steps=6)
    other = new_request([9] * 30, max_tokens=4, tenant="b")
    engine.submit(other)
    steps = 0
    while not output_of(other).tokens:
        engine.step()
        steps += 1
    assert steps <= 5
    run(engine)
    assert_as_alone(qwen3, *flood, other)
