"""The durations that are valid measurements of passes, and those that are not."""

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider import MediaSpan, PrefillChunk
from mlx_provider.engine import prefill
from mlx_provider.engine.request import Phase
from mlx_provider.engine.scheduling.costs import Costs, Curve, PassTimer
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.engine.scheduling.step import StepPlan
from mlx_provider.families.text import TextModel
from mlx_provider.testing.driver import Alternating, new_engine, new_request, run
from references import assert_as_alone
from stepping import step_until, submit
from wrapped_model import WrappedModel

CURVE = Curve(((1, 0.01), (256, 0.2)))


@pytest.mark.parametrize("idle", [0.0, 60.0])
def test_idle_time_is_not_attributed_to_a_pass(idle: float) -> None:
    """The engine does not wait for the last pass of a reply."""
    costs, now = Costs(CURVE), 0.0
    timer = PassTimer(costs)
    for _ in range(40):
        now += idle
        timer.launch(0.2, now)  # a prompt
        now += 0.2
        timer.end(now)
        for _ in range(3):  # a short reply
            timer.launch(0.01, now)
            timer.end(now, left=1)
            now += 0.01
    assert costs.pace["rows"] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(("slower", "other"), [(0.5, 0), (1, 0), (4, 0), (1, 0.1), (1, 0.5)])
def test_passes_of_another_engine_are_not_measured(slower: float, other: float) -> None:
    """The host prepares the next pass while one runs; passes of other engines run between."""
    costs, now, free = Costs(CURVE), 0.0, 0.0
    timer = PassTimer(costs)
    for _ in range(80):
        timer.launch(costs.pass_of(64, 0), now)
        ended, free = free, max(free, now) + slower * CURVE.seconds(64)
        now = max(now + 0.002, ended)
        timer.end(now, left=1)
        if other:
            now = free = max(now, free) + other
        now += 0.002
    assert costs.pass_of(64, 0) == pytest.approx(slower * CURVE.seconds(64), rel=0.1)


@dataclass
class RunsAhead(WrappedModel):
    """Prefills a whole image with its first tokens, as models with bidirectional attention do."""

    now: float = 0.0

    def embed(self, span: MediaSpan) -> Any:
        self.now += 0.7
        return mx.zeros(1)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        (span,) = chunk.prompt.spans
        ahead = span.start < chunk.start < span.end
        self.now += 1e-4 if ahead else CURVE.seconds(chunk.stop - chunk.start)
        return self.inner.prefill(chunk)


def test_the_time_of_an_image_is_no_measurement_of_text(qwen3: TextModel) -> None:
    model, costs = RunsAhead(qwen3), Costs(CURVE)
    engine = new_engine(model, max_chunk=16, costs=costs, clock=lambda: model.now)  # type: ignore[arg-type]
    request = new_request([30] * 640, max_tokens=1)
    image = MediaSpan(80, 560, "image", None)
    request.prompt = replace(request.prompt, spans=[image])
    run(engine, request)
    assert costs.pace["chunk"] == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(("layout", "passes"), [("solo", 3), ("merged", 2), ("grouped", 1)])
def test_rows_that_decode_in_several_passes_are_expected_to_take_as_long(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch, layout: str, passes: int
) -> None:
    """Otherwise a device with the measured speed would seem to be slow."""
    plans: list[StepPlan] = []
    ran = Scheduler.charge_step

    def remembered(of: Scheduler, plan: StepPlan) -> None:
        plans.append(plan)
        ran(of, plan)

    monkeypatch.setattr(Scheduler, "charge_step", remembered)
    costs = Costs(Curve(((1, 0.01), (256, 0.011)), ((1, 1e-5),)))
    engine = new_engine(qwen3, layout=layout, max_chunk=512, costs=costs, clock=lambda: 0.0)
    for length in (10, 12, 400):
        engine.submit(new_request([30] * length, max_tokens=6))
    step_until(engine, lambda: len(engine.scheduler.running) >= 3)
    engine.step()
    keys = sum(row.length for row in plans[-1].rows) - 3  # each row has one more token since
    assert plans[-1].pass_seconds == pytest.approx(passes * 0.01 + keys * 1e-5, rel=0.01)


@dataclass
class Device(WrappedModel):
    """Runs passes in sequence; the host waits when it reads a result."""

    launched: list[str] = field(default_factory=list)
    waits: int = 0
    """Number of times that the engine has waited for a launched pass."""

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        self.launched.append("chunk")
        return self.inner.prefill(chunk)

    def decode(self, *args: Any) -> mx.array:
        self.launched.append("rows")
        return self.inner.decode(*args)


def test_the_engine_does_not_wait_for_a_chunk_after_the_rows(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(qwen3)
    engine = new_engine(device, max_chunk=16, scheduler=Alternating)  # type: ignore[arg-type]
    stream, long = new_request([30] * 8, max_tokens=40), new_request([40] * 200, max_tokens=3)
    engine.submit(stream)
    step_until(engine, lambda: engine.scheduler.running)
    submit(engine, long, steps=1)
    waits = partial(setattr, device, "waits")
    own = SimpleNamespace(**vars(mx) | {"eval": lambda *a: [waits(device.waits + 1), mx.eval(*a)]})
    monkeypatch.setattr(prefill, "mx", own)
    step_until(engine, lambda: long.phase is Phase.DECODE)
    assert device.launched.count("chunk") >= 10
    assert device.waits == 1, "for the last one, whose logits are wanted"
    run(engine)
    assert_as_alone(qwen3, stream, long)


def test_a_failed_chunk_after_the_rows_is_run_again(qwen3: TextModel) -> None:
    """The engine does not wait for it, so that its error appears when the rows' tokens are read."""
    engine = new_engine(qwen3, max_chunk=16, scheduler=Alternating)
    stream, long = new_request([30] * 8, max_tokens=40), new_request([40] * 200, max_tokens=3)
    engine.submit(stream)
    step_until(engine, lambda: engine.scheduler.running)
    engine.submit(long)
    step_until(engine, lambda: long.prefilled_tokens)
    read = engine.batch.read

    def failing() -> Any:
        engine.batch.read = read  # type: ignore[method-assign]
        raise RuntimeError("[metal] command buffer failed")

    engine.batch.read = failing  # type: ignore[method-assign]
    (job,) = engine.scheduler.waiting
    engine.step()
    assert job.computed_tokens == 0
    run(engine)
    assert_as_alone(qwen3, stream, long)


def test_brief_prompts_join_before_the_first_decodes_again(qwen3: TextModel) -> None:
    engine = new_engine(qwen3, clock=lambda: 0.0)  # as if prefill took no time
    requests = [new_request([30 + i] * 12, max_tokens=6) for i in range(4)]
    submit(engine, *requests)
    for joined in range(1, 5):
        engine.step()
        counts = [len(request.rows[0].tokens) for request in requests]
        assert counts == [1] * joined + [0] * (4 - joined)
    submit(engine, steps=2)
    assert all(len(request.rows[0].tokens) > 1 for request in requests)
