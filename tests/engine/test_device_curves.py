"""The scheduler on curves of existing devices, without MLX: a prompt during decoding."""

from __future__ import annotations

from functools import cache

import pytest

from device_curves import (
    CHIPS,
    HOST,
    MODELS,
    PROMPT,
    STREAM,
    Chip,
    Estimate,
    Model,
    Outcome,
    pace_alone,
    simulate,
)
from mlx_provider.engine.scheduling.admission import Limits
from mlx_provider.engine.scheduling.chunking import FAIR, LONGEST_GAP, Chunking
from mlx_provider.engine.scheduling.costs import Costs
from mlx_provider.engine.scheduling.plan import GRID

M4_PRO = Chip(250e9, products=7.2e12, attention=5.6e12, vector=1.3e12, plateau=60)
HYBRID_27B = Model(15.3e9, 51.6e9, 65_536, heads=6, bandwidth=0.3, pair=0.3e6, recurrent=0.2)
SMALL_CPU = Chip(1e9, products=1e9, attention=1e9, vector=1e9, plateau=1, tile=8)
SMALL = Model(4e6, 0.25e6, 4, heads=4, bandwidth=1.0, pair=6)
DEVICES = {
    f"{chip}, {model}": Estimate(speeds, needs)
    for chip, speeds in CHIPS.items()
    for model, needs in MODELS.items()
}
MORE = {
    "M4 Pro, hybrid 27B": Estimate(M4_PRO, HYBRID_27B),
    "small CPU": Estimate(SMALL_CPU, SMALL),
}
"""The CPU is made up: small tiles, little to read."""
LONG, HELD = 60_000, 30_000
"""Tokens of a prompt and of each stream of an agent that works on many files."""


@cache
def idle(name: str, prompt: int) -> float:
    return simulate((DEVICES | MORE)[name], 0, prompt=prompt).rate


def paced(device: Estimate, found: Outcome, streams: int, target: float, held: int) -> bool:
    """Whether the streams were as fast as the stall target demands."""
    alone = 1 / pace_alone(device, streams, held)
    return 1 / found.pace <= 1.02 * max(target, FAIR * alone) + HOST


@pytest.mark.parametrize("name", DEVICES)
def test_a_long_prompt_beside_streams_uses_the_whole_device(name: str) -> None:
    """The shares of prompt and streams, relative to each alone."""
    device = DEVICES[name]
    found = simulate(device, 4, prompt=LONG, held=HELD)
    assert found.rate / idle(name, LONG) + found.pace / pace_alone(device, 4, HELD) >= 0.95
    assert found.worst <= LONGEST_GAP + 2 * HOST
    assert paced(device, found, 4, 0.1, HELD)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("name", [*DEVICES, *MORE])
def test_a_shorter_prompt_nearly_uses_the_device_and_a_tighter_target_gives_streams_more(
    name: str, streams: int
) -> None:
    device = (DEVICES | MORE)[name]
    tight, loose = (simulate(device, streams, target) for target in (0.04, 0.1))
    for found, target in ((tight, 0.04), (loose, 0.1)):
        used = found.rate / idle(name, PROMPT) + found.pace / pace_alone(device, streams)
        assert used >= 0.84
        assert paced(device, found, streams, target, STREAM)
    assert tight.pace >= 0.99 * loose.pace
    assert tight.rate >= 0.25 * idle(name, PROMPT)


@pytest.mark.parametrize("name", ["M5 Max, hybrid 9B", "H200, dense 8B", "small CPU"])
def test_no_stream_waits_longer_than_the_stall_target_if_chunks_within_it_pay(name: str) -> None:
    found = simulate((DEVICES | MORE)[name], 1)
    assert found.worst <= 0.11 + 2 * HOST


def test_with_a_chunk_grid_a_stream_waits_for_one_grid_step_at_most() -> None:
    device = MORE["M4 Pro, hybrid 27B"]
    found = simulate(device, 4)
    between = device.seconds(0, 0, GRID, PROMPT) + device.seconds(4, 4 * STREAM)
    assert found.worst <= max(LONGEST_GAP, between) + 2 * HOST


@pytest.mark.parametrize("name", ["M3 Max, dense 8B", "M5 Max, 30B-A3B", "H200, hybrid 9B"])
def test_a_brief_prompt_waits_for_one_chunk_and_its_own_share(name: str) -> None:
    device = DEVICES[name]
    found = simulate(device, 4, prompt=LONG, held=HELD, brief=500)
    alone, own = 1 / pace_alone(device, 4, HELD), device.seconds(0, 0, 500)
    share = 1 - alone / max(0.1, FAIR * alone)
    assert 0 < found.first <= 2 * (found.worst + own) / share


@pytest.mark.parametrize("name", ["M3 Max, dense 8B", "M5 Max, 30B-A3B", "H200, dense 8B"])
def test_streams_have_the_rate_that_the_log_names(name: str) -> None:
    device = DEVICES[name]
    chunking = Chunking(Limits(64, 256, 0.1, 2048, 0), Costs(device.measured()), grid=1, fixed=None)
    promise = chunking.expected_pace(4, STREAM, PROMPT // 2)
    found = simulate(device, 4)
    assert promise.alone == pytest.approx(1 / pace_alone(device, 4), rel=0.05)
    assert promise.average == pytest.approx(1 / found.pace, rel=0.3)
    assert promise.longest == pytest.approx(found.worst, rel=0.35)
    assert promise.share == pytest.approx(found.rate / idle(name, PROMPT), rel=0.15)
