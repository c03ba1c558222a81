"""Rows share passes only where a device treats every place in them alike."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider import LoadedModel, LoadOptions, PrefillChunk
from mlx_provider.engine.scheduling.chunking import ROWS
from mlx_provider.engine.scheduling.ledger import Limits, MemoryProfile
from mlx_provider.errors import BadRequest
from mlx_provider.families.text import load_text
from mlx_provider.serving.probe import NO_ROOM, Probe, unlimited
from mlx_provider.serving.reproducible import Reproducible, exact_rows
from tiny import build
from wrapped_model import WrappedModel

SOLO = Probe("solo", MemoryProfile(0, 0), ())


@dataclass
class Uneven(WrappedModel):
    """A model that computes otherwise at the last place of a pass, or not at all."""

    noise: float
    fails: bool = False

    def decode(self, tokens: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        if self.fails and tokens.size > 4:
            raise RuntimeError("[metal] no such kernel")
        logits = self.inner.decode(tokens, cache, positions)
        last = mx.arange(tokens.size)[:, None] == tokens.size - 1
        return mx.where(last & (tokens.size > 1), logits * (1 + self.noise), logits)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_equal_places_allow_wanted_rows(load: Callable[..., LoadedModel], family: str) -> None:
    """In 4 bit: a BLAS for float32 has other kernels for the last rows of an odd number."""
    model = load(family, "4 bit")
    found = exact_rows(model, model.make_cache, 5)
    assert (found.rows, found.note) == (5, "")


@pytest.mark.parametrize(
    ("noise", "fails", "told"),
    [(1e-6, False, "at place 4 of 5 its logits differ"), (0.0, True, "no such kernel")],
)
def test_unequal_or_failed_places_give_each_row_a_separate_pass(
    load: Callable[..., LoadedModel], noise: float, fails: bool, told: str
) -> None:
    model: Any = Uneven(load("qwen3"), noise, fails)
    found = exact_rows(model, model.make_cache, 5)
    assert found.rows == 1
    assert found.note.startswith("each row decodes in a pass of its own: ")
    assert told in found.note


@dataclass
class Unsteady(WrappedModel):
    """A device that rounds a short pass otherwise each time, or keys beyond 512 places."""

    prompts: bool
    passes: int = 0

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        self.passes += self.prompts and chunk.stop - chunk.start < 256
        return self.inner.prefill(chunk) * (1 + 1e-6 * self.passes)

    def decode(self, tokens: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        self.passes += not self.prompts and cache[0].offset > 512
        return self.inner.decode(tokens, cache, positions) * (1 + 1e-6 * self.passes)


@pytest.mark.parametrize("layout", ["grouped", "padded", "solo"])
def test_the_rows_of_a_pass_depend_on_no_measured_time(
    load: Callable[..., LoadedModel], layout: str
) -> None:
    model, found = load("qwen3"), replace(SOLO, layout=layout, padded=True)
    fixed = Reproducible.of(model, model.make_cache, found, Limits(4, 8, 0.1, 256, 256), unlimited)
    assert fixed.shapes.rows == 4


@pytest.mark.parametrize("wanted", [1, 5])
@pytest.mark.parametrize("prompts", [True, False])
def test_a_model_with_unsteady_results_is_refused_as_not_reproducible(
    load: Callable[..., LoadedModel], prompts: bool, wanted: int
) -> None:
    model: Any = Unsteady(load("qwen3"), prompts)
    assert not exact_rows(model, model.make_cache, wanted).steady
    with pytest.raises(BadRequest, match="MLX_CUDA_USE_CUDNN_SDPA=0"):
        Reproducible.of(model, model.make_cache, SOLO, Limits(4, 8, 0.1, 256, 256), bool)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.sweep)])
def test_the_trial_stays_within_its_reserved_memory(family: str, tmp_path: Path) -> None:
    model = load_text(build(tmp_path / "m", family), LoadOptions())
    exact_rows(model, model.make_cache, 2)  # weights are read at their first use
    asked: list[int] = []

    def reserve(nbytes: int) -> bool:
        asked.append(nbytes)
        mx.reset_peak_memory()
        return True

    before = mx.get_active_memory()
    assert exact_rows(model, model.make_cache, ROWS, reserve).rows == ROWS
    assert mx.get_peak_memory() - before <= asked[-1]


def test_without_memory_for_a_trial_rows_run_alone(load: Callable[..., LoadedModel]) -> None:
    model: Any = Uneven(load("qwen3"), 0.0, fails=True)  # fails if several rows run
    found = exact_rows(model, model.make_cache, 5, lambda nbytes: False)
    assert (found.rows, found.note) == (1, f"each row decodes in a pass of its own: {NO_ROOM}")
