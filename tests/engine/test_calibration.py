"""At load, passes of any kind of model are timed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from device_curves import CHIPS, MODELS, Chip, Estimate, Model
from few_passes import OF_THE_PRODUCT
from mlx_provider import ModelInfo, PrefillChunk, Prompt
from mlx_provider.engine.execution import calibration
from mlx_provider.engine.execution.calibration import (
    DEEP_WIDTHS,
    DEPTHS,
    WIDTHS,
    calibrate,
)
from mlx_provider.engine.execution.pass_memory import measure
from mlx_provider.engine.memory import profile
from mlx_provider.engine.scheduling.chunking import IDLE_SECONDS
from mlx_provider.engine.scheduling.costs import UNMEASURED, Curve
from mlx_provider.families.text import TextModel


@pytest.fixture(autouse=True)
def _passes_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_THE_PRODUCT.items():
        monkeypatch.setattr(calibration, name, value)


@dataclass
class Timed:
    """Records the ends of chunks, and fails at a given position."""

    inner: TextModel
    info: ModelInfo
    fails_from: int = 2**30
    reached: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        if chunk.stop - chunk.start >= self.fails_from:
            raise RuntimeError("[metal::malloc] out of memory")
        self.reached.append(chunk.stop)
        return self.inner.prefill(chunk)


@pytest.mark.parametrize("context", [2, 128, 1024, 2600, 32768])
def test_no_pass_reaches_beyond_the_context(qwen3: TextModel, context: int) -> None:
    model = Timed(qwen3, replace(qwen3.info, context_length=context))
    curve = calibrate(model, qwen3.make_cache)  # type: ignore[arg-type]
    assert max(model.reached, default=0) <= context
    assert bool(curve.depths) == (context > DEPTHS[-1])
    assert (curve is UNMEASURED) == (context == 2)


def test_a_failed_pass_is_not_measured(qwen3: TextModel) -> None:
    for fails_from, widths in ((1, ()), (4, ()), (256, WIDTHS[:-1])):
        model = Timed(qwen3, qwen3.info, fails_from)
        curve = calibrate(model, qwen3.make_cache)  # type: ignore[arg-type]
        assert set(widths) <= {n for n, _ in curve.widths} or (curve is UNMEASURED and not widths)
        assert all(n < fails_from for n, _ in curve.widths) or curve is UNMEASURED


@dataclass
class Room:
    """Free memory; measurements reserve a part of it."""

    free: int
    most: int = 0

    def reserve(self, nbytes: int) -> bool:
        if nbytes > self.free:
            return False
        self.most = max(self.most, nbytes)
        return True


ROUNDING = 2**18
"""Bytes by which MLX rounds the buffers of a pass up to whole pages, in all: 132 kB were seen."""


@pytest.mark.parametrize(("tokens", "deepest"), [(8000, 2048), (2048, 1024), (700, 0)])
def test_passes_stay_within_the_free_memory(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch, tokens: int, deepest: int
) -> None:
    """With less memory, they use a shorter cache, or none. All memory that they use is reserved."""
    model = Timed(qwen3, replace(qwen3.info, context_length=32768))
    qwen3.prefill(PrefillChunk(Prompt([1]), 0, 1, cache := qwen3.make_cache()))
    room = Room(tokens * profile(cache, 1).token_bytes)
    peaks: list[int] = []
    reset = mx.reset_peak_memory
    monkeypatch.setattr(
        mx, "reset_peak_memory", lambda: (peaks.append(mx.get_peak_memory()), reset())
    )
    before = mx.get_active_memory()
    for measured in (
        lambda: calibrate(model, qwen3.make_cache, reserve=room.reserve),  # type: ignore[arg-type]
        lambda: measure(model, qwen3.make_cache, UNMEASURED, reserve=room.reserve),  # type: ignore[arg-type]
    ):
        reset()
        peaks.clear()
        curve = measured()
        assert max(*peaks, mx.get_peak_memory()) - before <= room.most + ROUNDING
        assert room.most <= room.free
        if isinstance(curve, Curve):
            assert len(curve.widths) > 2
            assert bool(curve.depths) == bool(deepest)
            assert deepest <= max(model.reached) < 2 * max(deepest, 512)


# -- curves of existing devices, on a simulated clock

BASE = Chip(90e9, products=2.9e12, attention=2.25e12, vector=0.5e12, plateau=40)
"""10 cores: a quarter of an M3 Max."""
DEVICES = CHIPS | {
    "M3": BASE,
    "M3 Pro": Chip(140e9, products=5.2e12, attention=4e12, vector=0.9e12, plateau=50),
    "M4": replace(BASE, bytes=108e9, products=3.4e12),
    "M4 Pro": Chip(250e9, products=7.2e12, attention=5.6e12, vector=1.3e12, plateau=60),
    "M4 Max": Chip(500e9, products=14e12, attention=11e12, vector=2.6e12, plateau=78),
    "M5": Chip(140e9, products=11e12, attention=9e12, vector=0.8e12, plateau=80),
}
LOADED = MODELS | {
    "dense 14B": Model(8.3e9, 28e9, 163_840, heads=5, bandwidth=1.0, pair=0.82e6),
    "dense 32B": Model(18.4e9, 64e9, 262_144, heads=8, bandwidth=0.8, pair=1.05e6),
    "hybrid 27B": Model(15.3e9, 51.6e9, 65_536, heads=6, bandwidth=0.3, pair=0.3e6, recurrent=0.2),
}
FIRST_KERNEL = 0.03
"""Seconds by which the first pass of each width takes longer."""


@dataclass
class OnAClock:
    """A model whose passes only advance a clock."""

    device: Estimate
    now: float = 0.0
    seen: set[tuple[int, bool]] = field(default_factory=set)
    info: Any = field(default_factory=lambda: SimpleNamespace(context_length=40_960, vocab_size=9))

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        width, deep = chunk.stop - chunk.start, chunk.start >= DEPTHS[0]
        first = (width, deep) not in self.seen
        self.seen.add((width, deep))
        self.now += self.device.seconds(0, 0, width, chunk.start) + FIRST_KERNEL * first
        return mx.zeros(1)


@pytest.mark.parametrize("chip", DEVICES)
def test_the_slopes_of_a_deep_cache_are_found_on_every_device(
    chip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each width of a chunk at that depth."""
    monkeypatch.setattr(calibration, "SLOW_DEPTHS", DEPTHS[:1])
    for needs in LOADED.values():
        model = OnAClock(device := Estimate(DEVICES[chip], needs))
        monkeypatch.setattr(
            calibration, "time", SimpleNamespace(perf_counter=lambda of=model: of.now)
        )
        curve = calibrate(model, list)  # type: ignore[arg-type]
        assert model.now < 15
        for width in DEEP_WIDTHS:
            if device.seconds(0, 0, width, DEPTHS[0]) <= IDLE_SECONDS:
                assert curve.per_key(width) == pytest.approx(device.per_key(width), rel=0.15)
        assert curve.per_key(2048) >= 0.85 * device.per_key(2048)
