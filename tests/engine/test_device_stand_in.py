"""The scheduler and the calibration on simulated devices: like an H100, and like an M3 Max."""

import logging
from itertools import pairwise

import pytest

from mlx_provider.engine.scheduling.chunking import LONGEST_GAP
from simulated_engine import DIAL, Device, Engine, h100, m3_max

DEVICES = {"H100": h100, "M3 Max": m3_max}


def beside_streams(device: Device, streams: int = 4) -> Engine:
    """An engine with streams of unlike lengths that have decoded for a while."""
    return decoding(Engine(device), streams)


def decoding(engine: Engine, streams: int = 4) -> Engine:
    engine.until(*[engine.ask(500 + 117 * i) for i in range(streams)])
    for _ in range(20):
        engine.step()
    engine.gaps.clear()
    engine.chunks.clear()
    return engine


@pytest.mark.parametrize("name", DEVICES)
def test_brief_prompts_at_once_are_prefilled_one_after_the_other(name: str) -> None:
    """Without a decode step between: their first tokens come within 1.3 times of prompts alone."""
    lengths = [500 + i for i in range(16)]
    alone, engine = Engine(DEVICES[name]()), Engine(DEVICES[name]())
    for length in lengths:
        alone.until(alone.ask(length, 1))
    engine.until(*[engine.ask(length, 128) for length in lengths])
    assert engine.now <= 1.3 * alone.now


@pytest.mark.parametrize("name", DEVICES)
def test_total_throughput_never_falls_when_streams_are_added(name: str) -> None:
    found = []
    for streams in (1, 2, 4, 8, 16, 32):
        engine = Engine(DEVICES[name]())
        for i in range(streams):
            engine.ask(500 + i % 3, 128)
        while engine.scheduler.busy:
            engine.step()
        found.append(engine.tokens / engine.now)
    tile = 0.97 if name == "M3 Max" else 1.0  # 13 to 32 rows take a tile, which few rows need not
    assert all(more >= tile * fewer for fewer, more in pairwise(found)), found


@pytest.mark.parametrize(("name", "least"), [("H100", 3000), ("M3 Max", 200)])
def test_streams_keep_their_pace_beside_a_long_prompt(name: str, least: float) -> None:
    """Every gap is within 1.5 times the stall target, or the average is, where chunks worth their
    pass take longer."""
    engine = beside_streams(DEVICES[name]())
    began = engine.now
    engine.until(engine.ask(8000))
    assert sum(engine.gaps) / len(engine.gaps) <= 1.5 * DIAL
    assert max(engine.gaps) <= (1.5 * DIAL if name == "H100" else LONGEST_GAP)
    assert 8000 / (engine.now - began) >= least


@pytest.mark.parametrize("name", DEVICES)
def test_chunks_have_few_shapes(name: str) -> None:
    """No chunk but the last has fewer than 256 tokens, and each ends on a grid of its size."""
    engine, shapes = beside_streams(DEVICES[name]()), set[tuple[int, int]]()
    for length in (8000, 7001, 3333, 6500):
        engine.until(engine.ask(length))
        inner = [chunk for chunk in engine.chunks if chunk.job.tokens_left or chunk.stop < length]
        shapes |= {(chunk.size, chunk.start) for chunk in inner if chunk.stop < length - 1}
        engine.chunks.clear()
    whole = {(size, start) for size, start in shapes if size in (256, 512, 1024, 2048)}
    assert len(shapes - whole) <= 4  # the last chunks
    assert all(start % size == 0 for size, start in whole)


def test_compile_times_and_the_layout_are_measured_on_each_device() -> None:
    """And whether a chunk pays in the pass of rows: not where it makes each of its tokens a row.
    Rows do not share a pass on a device that needs more for another row than for a pass of one."""
    devices = h100(), m3_max(), h100(apart=3.1e-3), h100(row=8e-3)
    engines = [*map(Engine, devices)]
    curves = [each.scheduler.costs.curve for each in engines]
    assert [curve.first for curve in curves] == pytest.approx([0.07, 0.0, 0.07, 0.07])
    assert [each.layout for each in engines] == ["padded", "grouped", "grouped", "solo"]
    assert [curve.mixing > 0 for curve in curves] == [True, False, False, False]
    for each in engines:
        assert each.device.took <= 5
    *others, solo = (each.measured for each in engines)
    assert all(each.choose_layout(together=True) is each for each in others)
    where = [solo.choose_layout(together=together).probe for together in (True, False)]
    assert [(each.layout, each.mixes) for each in where] == [("grouped", True), ("solo", False)]


@pytest.mark.parametrize("slower", [4.0, 0.25])
def test_measurements_that_are_wrong_are_corrected(
    slower: float, caplog: pytest.LogCaptureFixture
) -> None:
    engine = beside_streams(h100())
    engine.device.slower = slower
    with caplog.at_level(logging.INFO):
        first, *_, last = [engine.estimate_of(16_000) for _ in range(9)]
    assert "times as long as measured: measured anew" in caplog.text
    assert not 1 / 1.2 < first < 1.2
    assert 1 / 1.1 < last < 1.1


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("slower", [3.0, 0.4])
def test_the_next_engine_begins_with_the_corrected_curve_and_corrects_it_back(
    name: str, slower: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first estimates are right while the device stays as it was, and later ones after."""
    engine = beside_streams(DEVICES[name]())
    engine.device.slower = slower
    for _ in range(4):
        engine.estimate_of(16_000)
    again = Engine(DEVICES[name](), curve=engine.scheduler.costs.curve)
    again.device.slower = slower
    caplog.clear()
    with caplog.at_level(logging.INFO):
        decoding(again)
        found = [again.estimate_of(16_000) for _ in range(2)]
        assert all(1 / 1.2 < each < 1.2 for each in found)
        again.device.slower = 1.0
        *_, last = [again.estimate_of(16_000) for _ in range(9)]
    assert "measured anew" in caplog.text
    assert 1 / 1.1 < last < 1.1
