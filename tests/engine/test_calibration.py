"""At load, passes of any kind of model are timed."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from failing import Failing
from few_passes import OF_THE_PRODUCT
from mlx_provider import ModelInfo, PrefillChunk, Prompt
from mlx_provider.engine.execution import sampler
from mlx_provider.engine.row_cache import profile
from mlx_provider.engine.scheduling.costs import UNMEASURED
from mlx_provider.engine.scheduling.ledger import MemoryProfile
from mlx_provider.families.text import TextModel
from mlx_provider.records.extensions import MOST_DRAFTS
from mlx_provider.serving import calibration
from mlx_provider.serving.calibration import (
    COMPILED,
    DEPTHS,
    MIXED,
    WIDTHS,
    Times,
    calibrate,
    compile_kernels,
)
from mlx_provider.serving.probe import Probe, unlimited
from wrapped_model import WrappedModel


@pytest.fixture(autouse=True)
def _passes_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_THE_PRODUCT.items():
        monkeypatch.setattr(calibration, name, value)


FOUND = Probe("grouped", MemoryProfile(0, 0), (), mixes=True, drafts=True, padded=True)


@dataclass
class Timed(WrappedModel):
    """Records the ends of chunks, and fails at a given position."""

    info: ModelInfo
    fails_from: int = 2**30
    reached: list[int] = field(default_factory=list)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        if chunk.stop - chunk.start >= self.fails_from:
            raise RuntimeError("[metal::malloc] out of memory")
        self.reached.append(chunk.stop)
        return self.inner.prefill(chunk)


@pytest.mark.parametrize("context", [2, 128, 1024, 2600])
def test_no_pass_reaches_beyond_the_context(qwen3: TextModel, context: int) -> None:
    model = Timed(qwen3, replace(qwen3.info, context_length=context))
    curve = calibrate(model, qwen3.make_cache, FOUND).curve  # type: ignore[arg-type]
    assert max(model.reached, default=0) <= context
    assert bool(curve.depths) == (context > DEPTHS[-1])
    assert (curve is UNMEASURED) == (context == 2)


def test_passes_with_drafts_are_timed(qwen3: TextModel) -> None:
    """As they will run: each token of the row in the place of a row."""
    widths: list[int] = []

    class Counted(Timed):
        def decode(self, tokens: mx.array, *args: Any) -> mx.array:
            widths.append(tokens.size)
            return self.inner.decode(tokens, *args)

    model: Any = Counted(qwen3, qwen3.info)
    curve = calibrate(model, qwen3.make_cache, FOUND).curve
    assert [n for n, _ in curve.drafts] == [1, 3, 7]
    assert all(seconds >= 0 for _, seconds in curve.drafts)
    assert widths[-9:] == [2, 2, 2, 4, 4, 4, 8, 8, 8]


def test_a_failed_pass_is_not_measured(qwen3: TextModel) -> None:
    for fails_from, widths in ((1, ()), (4, ()), (256, WIDTHS[:6])):
        model = Timed(qwen3, qwen3.info, fails_from)
        curve = calibrate(model, qwen3.make_cache, FOUND).curve  # type: ignore[arg-type]
        assert set(widths) <= {n for n, _ in curve.widths} or (curve is UNMEASURED and not widths)
        assert all(n < fails_from for n, _ in curve.widths) or curve is UNMEASURED


class Steady:
    """Passes of a device without memory for a deep cache: chunks take 0.1 s, rows 1 s."""

    def deepen(self, depth: int) -> bool:
        return False

    def chunk(self, tokens: int, *, deep: bool = False) -> list[float]:
        return [] if deep else [0.1] * 3

    def rows(self, *given: object) -> list[float]:
        return [1.0] * 3


@pytest.mark.parametrize(("seconds", "timed"), [(5.0, 1), (2.0, 0)])
def test_no_further_passes_are_timed_once_all_have_taken_long(seconds: float, timed: int) -> None:
    """What was not timed, such as mixed passes, does not pay."""
    times = Times(Steady(), 4096, [1024], 240, seconds)  # type: ignore[arg-type]
    curve = times.measure(replace(FOUND, padded=False)).curve
    assert len(curve.rows) == 1
    assert (len(curve.drafts), curve.mixing) == (timed, 0.0)


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
    room = Room(tokens * profile(cache).token_bytes)
    peaks: list[int] = []
    reset = mx.reset_peak_memory
    monkeypatch.setattr(
        mx, "reset_peak_memory", lambda: (peaks.append(mx.get_peak_memory()), reset())
    )
    before = mx.get_active_memory()
    reset()
    curve = calibrate(model, qwen3.make_cache, FOUND, room.reserve).curve  # type: ignore[arg-type]
    assert max(*peaks, mx.get_peak_memory()) - before <= room.most + ROUNDING
    assert room.most <= room.free
    assert len(curve.widths) > 2
    assert bool(curve.depths) == bool(deepest)
    assert deepest <= max(model.reached) < 2 * max(deepest, 512)


def test_a_load_runs_all_kinds_of_passes_and_draws_so_that_their_kernels_are_compiled(
    qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = set[tuple[str, int, tuple[str, ...]]]()

    def recorded(name: str, draw: sampler.Draw, *given: Any) -> mx.array:
        drawn.add((name, len(given[0]), tuple(given[1])))
        return draw(*given)

    draws = {name: partial(recorded, name, draw) for name, draw in sampler.DRAWS.items()}
    monkeypatch.setattr(sampler, "DRAWS", draws)
    model = Failing(qwen3)
    compile_kernels(model, qwen3.make_cache, unlimited)  # type: ignore[arg-type]
    assert {n for n in WIDTHS if n <= COMPILED} <= {*model.prefills}
    drafts = 1 + MOST_DRAFTS
    assert {1, MIXED, MIXED + COMPILED, drafts} <= {*model.decodes}
    usual = {("all", ()), ("above", ("top_p",)), ("above", ("min_p",)), ("few", ("top_k", "top_p"))}
    assert drawn == {
        (name, rows, ("temperature", *others)) for name, others in usual for rows in (1, MIXED)
    }
