"""Passes are timed while a model is loaded, whatever the model is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider import ModelInfo, PrefillChunk
from mlx_provider.engine.execution.calibration import DEPTH, WIDTHS, calibrate
from mlx_provider.engine.scheduling.costs import UNMEASURED
from mlx_provider.families.text import TextModel


@dataclass
class Timed:
    """Notes how far prompts reached, and fails where told."""

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


@pytest.mark.parametrize("context", [2, 128, 1024, 32768])
def test_no_pass_reaches_beyond_the_context(qwen3: TextModel, context: int) -> None:
    model = Timed(qwen3, replace(qwen3.info, context_length=context))
    curve = calibrate(model, qwen3.make_cache)  # type: ignore[arg-type]
    assert max(model.reached, default=0) <= context
    assert (max(model.reached) > DEPTH) == (context > DEPTH)
    assert (curve is UNMEASURED) == (context == 2)


def test_what_fails_is_not_measured(qwen3: TextModel) -> None:
    for fails_from, widths in ((1, ()), (4, ()), (256, WIDTHS[:-1])):
        model = Timed(qwen3, qwen3.info, fails_from)
        curve = calibrate(model, qwen3.make_cache)  # type: ignore[arg-type]
        assert tuple(n for n, _ in curve.widths) == widths or (curve is UNMEASURED and not widths)
