"""Short prompts that arrive together are prefilled before the next decode step, long ones not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import Phase
from mlx_provider.engine.scheduling.chunking import StepPlan
from mlx_provider.engine.scheduling.costs import Costs, Curve
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.families.text import TextModel
from mlx_provider.testing.driver import new_engine, new_request, run


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], int]:
    """A function that runs one step and returns the number of rows that decoded in it."""
    rows: list[int] = []
    charge_step = Scheduler.charge_step

    def counted(of: Scheduler, plan: StepPlan) -> None:
        rows.append(len(plan.rows))
        charge_step(of, plan)

    monkeypatch.setattr(Scheduler, "charge_step", counted)

    def step(engine: Engine) -> int:
        rows.clear()
        engine.step()
        return sum(rows)

    return step


def test_brief_prompts_join_before_the_first_decodes_again(
    qwen3: TextModel, decodes: Callable[[Engine], int]
) -> None:
    engine = new_engine(qwen3, clock=lambda: 0.0)  # as if prefill took no time
    for i in range(4):
        engine.submit(new_request([30 + i] * 12, max_tokens=6))
    assert [decodes(engine) for _ in range(6)] == [0, 0, 0, 0, 4, 4]
    run(engine)


def test_rows_that_have_waited_for_the_longest_gap_decode_first(
    qwen3: TextModel, decodes: Callable[[Engine], int]
) -> None:
    now = [0.0]
    no_time = Costs(Curve(((1, 1e-4), (2048, 1e-3))))
    engine = new_engine(qwen3, clock=lambda: now[0], costs=no_time)
    for i in range(4):
        engine.submit(new_request([30 + i] * 12, max_tokens=6))
    rows = []
    for _ in range(5):
        rows.append(decodes(engine))
        now[0] += 0.3  # less than half of the longest gap
    assert rows == [0, 0, 0, 3, 4]
    run(engine)


def test_a_long_prompt_does_not_delay_a_decode_step(
    qwen3: TextModel, decodes: Callable[[Engine], int]
) -> None:
    engine = new_engine(qwen3, clock=lambda: 0.0, max_chunk=16)
    engine.submit(new_request([30] * 12, max_tokens=6))
    while decodes(engine) == 0:
        pass
    long = new_request([31] * 700, max_tokens=2)
    engine.submit(long)
    assert [decodes(engine) for _ in range(3)] == [1, 1, 1]
    assert long.phase is Phase.PREFILL
    run(engine)
