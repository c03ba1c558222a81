"""How many kernels a decode step launches, counted on the graph that it builds.

Where a GPU has one fused kernel the graph gets one node; views launch none. Host and device pay for
every launch, in every layer of every step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider import LoadOptions
from mlx_provider.engine.execution import batch_layout
from mlx_provider.engine.execution.batch_layout import Layout, make_layout
from mlx_provider.engine.execution.decode_batch import run_pass
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.testing.driver import new_request
from mlx_provider.testing.tiny_models import build

LAYERS = 36
VIEWS = {"Slice", "Reshape", "Transpose", "Broadcast", "Squeeze", "ExpandDims", "AsStrided",
         "Flatten", "Unflatten", "View", "BroadcastAxes", "Split", "Depends"}  # fmt: skip
ALIKE = [300] * 8
PAIRS = [260, 260, 560, 560, 1200, 1200, 2500, 2500]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """As deep as Qwen3-8B; in bfloat16, for which nothing is evaluated while a step is built."""
    folder: Path = tmp_path_factory.mktemp("deep") / "qwen3"
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 32}
    return load_text(build(folder, "qwen3", dtype="bfloat16", **sizes), LoadOptions())


@pytest.fixture
def fused() -> Iterator[pytest.MonkeyPatch]:
    """Operations that a CPU build makes of several nodes are one, with the same inputs."""

    def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return mx.abs(x)

    def rope(x: mx.array, *args: Any, offset: Any, **more: Any) -> mx.array:
        return mx.depends(mx.sin(x), [offset]) if isinstance(offset, mx.array) else mx.sin(x)

    def attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any, **more: Any) -> mx.array:
        return mx.depends(mx.cos(q), [k, v, *([mask] if isinstance(mask, mx.array) else [])])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "rms_norm", rms_norm)
        patch.setattr(mx.fast, "rope", rope)
        patch.setattr(mx.fast, "scaled_dot_product_attention", attention)
        yield patch


def filled(model: TextModel, lengths: list[int], layout: str = "grouped") -> Layout:
    """Rows of these lengths, three steps on."""
    rows = make_layout(layout)
    for length in lengths:
        cache = model.make_cache()
        for layer in cache:  # what it holds does not matter
            layer.update_and_fetch(*(mx.zeros((1, 2, length, 16), mx.bfloat16) for _ in range(2)))
        rows.add(new_request([30] * length).rows[0], cache)
    for _ in range(3):
        mx.eval(step(model, rows))
    return rows


def step(model: TextModel, layout: Layout) -> list[mx.array]:
    return [
        run_pass(model, each, mx.array([30] * len(each.rows)), [row.length for row in each.rows])
        for each in layout.passes()
    ]


def kernels(model: TextModel, layout: Layout, folder: Path) -> int:
    """Those of the next step."""
    graph = folder / "step.dot"
    mx.export_to_dot(str(graph), *step(model, layout))
    names = re.findall(r'label ?= ?"([A-Za-z0-9_]+)"', graph.read_text())
    return sum(len(name) > 1 and name not in VIEWS for name in names)  # arrays have one letter


def test_rows_apart_launch_little_more_than_rows_together(
    deep: TextModel, fused: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    together = kernels(deep, filled(deep, ALIKE), tmp_path)
    assert together <= 20 * LAYERS + 10
    four = filled(deep, PAIRS)
    assert len(four.passes()) == 1
    assert kernels(deep, four, tmp_path) <= 1.65 * together
    fused.setattr(batch_layout, "MERGED_BYTES", 0)
    eight = filled(deep, ALIKE)
    assert len(eight.passes()) == 1
    assert kernels(deep, eight, tmp_path) <= 2.05 * together
