"""The scheduler on the curves of devices that people have: a prompt beside streams, no mlx.

Curves are estimates from published figures. M3 Max, 40 cores: 400 GB/s, 11.5 TFLOPS in quantised
matrix products whose tiles have 32 rows; M5 Max: 1.4 times the bandwidth, 4 times the compute;
H200: 4.8 TB/s. The CPU is made up: small tiles, little to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import pytest

from mlx_provider.engine.request import Request, Row, SamplingParams
from mlx_provider.engine.scheduling.costs import Costs, Curve
from mlx_provider.engine.scheduling.pass_timer import PassTimer
from mlx_provider.engine.scheduling.plan import GRID
from mlx_provider.engine.scheduling.scheduler import Budget, Limits, Scheduler
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.records import Prompt
from mlx_provider.testing.driver import TokenOutput

PROMPT = 16_000
STREAM = 8_000
WIDTHS = (1, 4, 8, 12, 16, 32, 64, 256)
DEPTH = 2048
HOST = 0.002
"""Seconds in which a step is launched."""


@dataclass(frozen=True)
class Device:
    """Seconds of a pass, by what it really does."""

    weights: float
    """To read them once."""
    tile: float
    """Of matrix products over one tile of rows."""
    rows: int = 32
    """Of a tile."""
    per_key: float = 147_456 / 400e9
    per_pair: float = 0.59e6 / 9e12
    vector: int = 13
    """Fewer rows than this take no tile: five of them cost what one costs."""
    experts: float = 0.0
    """To read all experts, of which a token takes 8 in 128."""
    per_token: float = 0.0
    """Compute of a token where it has experts."""
    recurrent: float = 0.0
    """Share of the weights that is read once more where rows and a chunk share a pass."""

    def seconds(self, rows: int, keys: int, chunk: int = 0, depth: int = 0) -> float:
        width = rows + chunk
        again = self.recurrent * self.weights if rows and chunk else 0.0
        return self.products(width) + again + self.attention(keys, chunk, depth)

    def attention(self, keys: int, chunk: int, depth: int) -> float:
        read = self.per_key * (keys + (depth if chunk else 0))
        return read + self.per_pair * chunk * depth

    def products(self, width: int) -> float:
        if self.experts:
            taken = 1 - (1 - 8 / 128) ** width
            return self.weights + max(0.006, taken * self.experts) + width * self.per_token
        if width < self.vector:
            return self.weights * max(1, 0.85 * ceil(width / 5))
        return self.tile * ceil(width / self.rows)

    def measured(self) -> Curve:
        short = [(n, self.seconds(0, 0, n, 0)) for n in WIDTHS]
        deep = [(n, self.seconds(0, 0, n, DEPTH)) for n in (1, 64)]
        return Curve.through(short, deep, DEPTH)


DEVICES = {
    "m3 max, 8b": Device(0.012, 0.045),
    "m3 max, 30b-a3b": Device(
        0.004, 0, experts=0.040, per_token=0.00088, per_key=98_304 / 400e9, per_pair=0.8e6 / 9e12
    ),
    "m3 max, hybrid 9b": Device(
        0.013, 0.048, per_key=32_768 / 400e9, per_pair=0.15e6 / 9e12, recurrent=0.2
    ),
    "m5 max, 8b": Device(0.0085, 0.0115, per_key=147_456 / 560e9, per_pair=0.59e6 / 36e12),
    "h200, 8b": Device(0.0025, 0.003, rows=64, per_key=147_456 / 4.5e12, per_pair=0.59e6 / 400e12),
    "m4 pro, hybrid 27b": Device(
        0.056, 0.25, per_key=65_536 / 273e9, per_pair=0.3e6 / 6e12, recurrent=0.2
    ),
    "small cpu": Device(0.004, 0.002, rows=8, per_key=4e-9, per_pair=6e-9),
}


@dataclass(frozen=True)
class Outcome:
    rate: float
    """Prompt tokens a second."""
    pace: float
    """Tokens a second of each stream, while the prompt is prefilled."""
    worst: float
    """Longest gap between two tokens of a stream, seconds."""


def simulate(device: Device, streams: int, target: float = 0.1, max_chunk: int = 2048) -> Outcome:
    """A prompt beside streams, on a device that runs one pass after the other."""
    costs = Costs(device.measured())
    budget = Budget(lambda tokens: tokens, lambda: 2**50, lambda need: None, lambda: 2**50)
    grid = GRID if device.recurrent else 1
    scheduler = Scheduler(Limits(64, 256, target, max_chunk, 2048), budget, costs, grid=grid)
    timer = PassTimer(costs)
    for _ in range(streams):
        job = scheduler.submit(request(STREAM), 0.0)
        scheduler.admit(0.0)
        scheduler.join(job)
        scheduler.decode(job.rows[0])
    now = free = read = began = 0.0
    gaps: list[float] = []
    job = scheduler.submit(request(PROMPT), now)
    while job.remaining:
        scheduler.admit(now)
        plan = scheduler.plan(now, mixes=True, stalled=now - read)
        keys = sum(row.length for row in plan.rows)
        size = plan.chunk.size if plan.chunk is not None else 0
        ended = free
        if plan.rows:
            timer.launched(plan.pass_seconds, now)
            mixed = (size, job.done) if plan.mixed else (0, 0)
            free = max(free, now + HOST) + device.seconds(len(plan.rows), keys, *mixed)
            now = max(now + HOST, ended)
            timer.ended(now, left=1)
            gaps.append(now - read)
            read = now
        if plan.chunk is not None and not plan.mixed:
            timer.launched(plan.chunk_seconds, now)
            free = max(free, now + HOST) + device.seconds(0, 0, size, job.done)
            now = free
            timer.ended(now)
        job.done += size
    took = max(now, free) - began
    return Outcome(PROMPT / took, len(gaps) / took, max(gaps[2:], default=0.0))


def request(length: int) -> Request:
    made = Request("r", Prompt([1] * length), SamplingParams(), 1000, EventQueue())
    made.rows = [Row(made, 0, TokenOutput())]
    return made


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
    """Experts are read by a small pass, too; a hybrid's chunks end on the grid, and so spill over
    into one more tile where rows are beside them."""
    device = DEVICES[name]
    idle = simulate(device, 0).rate
    for streams, least in ((1, 0.5), (4, 0.4)):
        found = simulate(device, streams)
        assert found.rate >= least * idle
        assert found.worst <= 0.1 + 2 * HOST


@pytest.mark.parametrize("streams", [1, 4])
def test_where_not_even_the_smallest_chunk_fits_into_the_target_a_prompt_goes_on(
    streams: int,
) -> None:
    """Its pass and that of the streams read the weights twice."""
    device = DEVICES["m4 pro, hybrid 27b"]
    found = simulate(device, streams)
    least = device.seconds(streams, streams * STREAM) + device.seconds(0, 0, GRID, PROMPT)
    assert found.rate >= 0.75 * simulate(device, 0).rate
    assert found.worst <= 1.01 * least + 2 * HOST


@pytest.mark.parametrize("name", DEVICES)
def test_a_tighter_target_gives_streams_more_and_leaves_the_prompt_some(name: str) -> None:
    device = DEVICES[name]
    alone = 1 / device.seconds(1, STREAM)
    tight, loose = simulate(device, 1, target=0.04), simulate(device, 1, target=0.1)
    assert tight.pace >= min(0.33 * alone, 0.99 * loose.pace)
    assert tight.pace >= 0.99 * loose.pace
    assert tight.rate >= 0.3 * simulate(device, 0).rate
