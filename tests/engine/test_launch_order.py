"""The host launches the next pass before it reads the tokens of the previous one, and delivers
events before a prompt has its own pass."""

from itertools import count
from typing import Any

import pytest

from failing import Failing
from host_gap import SAMPLING, ImaginedDevice, decoding, gaps
from mlx_provider.engine.request import Phase
from mlx_provider.engine.step_output import Post
from mlx_provider.families.text import TextModel
from mlx_provider.testing.driver import new_engine, new_request, run

STEPS = 12


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_device_that_is_slower_than_the_host_never_waits(
    qwen3: TextModel, rows: int, sampling: str
) -> None:
    """Each read of the host's clock advances it by one second."""
    engine = decoding(qwen3, rows, SAMPLING[sampling], STEPS)
    device = ImaginedDevice(seconds=1000, host=map(float, count()).__next__)
    assert gaps(engine, device, STEPS) == [0] * STEPS
    assert device.waited > 0


def test_no_prompt_overtakes_one_that_is_about_to_begin(qwen3: TextModel) -> None:
    """Each read of the clock advances it by a second, and what waits becomes more urgent."""
    engine = new_engine(qwen3, max_chunk=64, clock=map(float, count()).__next__)
    first, second = new_request([5] * 40), new_request([5] * 41)
    engine.submit(first), engine.submit(second)
    engine.step()
    assert (first.phase, second.phase) == (Phase.DECODE, Phase.WAITING)


def test_events_do_not_wait_for_a_chunk(qwen3: TextModel) -> None:
    model: Any = Failing(qwen3)
    engine = new_engine(model)
    late, other = (new_request([5] * 40, deadline=deadline) for deadline in (0.0, None))
    for request in (late, other):
        engine.submit(request)
    delivered: list[list[Post]] = []

    def deliver(posts: list[Post]) -> None:
        assert not model.prefills
        delivered.append(posts)

    engine.deliver = deliver
    engine.step()
    assert [request for ((request, _),) in delivered] == [late]
    assert model.prefills
    run(engine)
    assert sum(step.tokens for step in engine.output.steps) == other.completion_tokens
