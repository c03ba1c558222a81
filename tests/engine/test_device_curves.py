"""The scheduler on the curves of devices that people have: a prompt beside streams, no mlx."""

from __future__ import annotations

from dataclasses import replace

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
    pace_alone,
    reachable,
    simulate,
)
from mlx_provider.engine.scheduling.plan import GRID, LITTLE_MORE

M4_PRO = Chip(bytes=273e9, products=6.6e12, attention=6e12)
HYBRID_27B = Model(weights=15.3e9, products=51.6e9, key=65_536, pair=0.3e6, recurrent=0.2)
SMALL_CPU = Chip(bytes=1e9, products=1e9, attention=1e9, tile=8)
SMALL = Model(weights=4e6, products=0.25e6, key=4, pair=6)
DEVICES = {
    "m3 max, 8b": Estimate(CHIPS["M3 Max"], MODELS["dense 8B"]),
    "m3 max, 30b-a3b": Estimate(CHIPS["M3 Max"], MODELS["30B-A3B"]),
    "m3 max, hybrid 9b": Estimate(CHIPS["M3 Max"], MODELS["hybrid 9B"]),
    "m5 max, 8b": Estimate(CHIPS["M5 Max"], MODELS["dense 8B"]),
    "h200, 8b": Estimate(CHIPS["H200"], MODELS["dense 8B"]),
    "m4 pro, hybrid 27b": Estimate(M4_PRO, HYBRID_27B),
    "small cpu": Estimate(SMALL_CPU, SMALL),
}
"""The CPU is made up: small tiles, little to read."""


@pytest.mark.parametrize("name", ["m3 max, 8b", "m5 max, 8b", "h200, 8b", "small cpu"])
def test_a_prompt_beside_streams_keeps_its_rate_within_the_stall_target(name: str) -> None:
    device = DEVICES[name]
    idle = simulate(device, 0).rate
    one, four = simulate(device, 1), simulate(device, 4)
    assert one.rate >= 0.85 * idle
    assert four.rate >= 0.7 * idle
    assert max(one.worst, four.worst) <= 0.1 + 2 * HOST


@pytest.mark.parametrize("name", ["m3 max, 30b-a3b", "m3 max, hybrid 9b"])
def test_where_the_target_leaves_less_it_is_used_up(name: str) -> None:
    """Experts are read by a small pass, too; a hybrid's chunks have passes of their own."""
    device = DEVICES[name]
    idle = simulate(device, 0, grid=1).rate
    for streams, least in ((1, 0.5), (4, 0.4)):
        found = simulate(device, streams, grid=1)
        assert found.rate >= least * idle
        assert found.worst <= 0.1 + 2 * HOST


@pytest.mark.parametrize("streams", [1, 4])
def test_where_not_even_one_token_fits_into_the_target_a_prompt_goes_on(streams: int) -> None:
    """Its pass and that of the streams read the weights twice, for one token or for several."""
    device = Estimate(M4_PRO, replace(HYBRID_27B, recurrent=0.0))
    found = simulate(device, streams)
    once = device.seconds(1, 0)
    assert found.rate >= 0.3 * simulate(device, 0).rate
    assert found.worst <= LITTLE_MORE * (device.seconds(streams, streams * STREAM) + once)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("name", ["m3 max, hybrid 9b", "m4 pro, hybrid 27b"])
def test_on_a_grid_a_stream_waits_for_what_lies_between_two_of_its_points(
    name: str, streams: int
) -> None:
    device = DEVICES[name]
    found = simulate(device, streams)
    between = device.seconds(0, 0, GRID, PROMPT) + device.seconds(streams, streams * STREAM)
    assert found.worst <= max(0.1, between) + 2 * HOST
    assert found.rate >= 0.7 * simulate(device, 0).rate


@pytest.mark.parametrize("name", ["m3 max, 8b", "m3 max, 30b-a3b", "m5 max, 8b", "h200, 8b"])
def test_little_more_could_be_had_within_the_target(name: str) -> None:
    for streams in (1, 4):
        best = reachable(DEVICES[name], streams, 0.1)
        assert 0.8 * best <= simulate(DEVICES[name], streams).rate <= 1.1 * best


@pytest.mark.parametrize("name", DEVICES)
def test_a_tighter_target_gives_streams_more_and_leaves_the_prompt_some(name: str) -> None:
    device = DEVICES[name]
    tight, loose = simulate(device, 1, target=0.04), simulate(device, 1, target=0.1)
    assert tight.pace >= min(0.33 * pace_alone(device, 1), 0.99 * loose.pace)
    assert tight.pace >= 0.99 * loose.pace
    assert tight.rate >= 0.3 * simulate(device, 0).rate
