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
from mlx_provider.testing.driver import new_engine, new_request
from mlx_provider.testing.tiny_models import build
from mlx_provider_qwen3_5 import load

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
    """Rows of these lengths that joined one after another, a step between."""
    rows = make_layout(layout)
    for length in lengths:
        cache = model.make_cache()
        for layer in cache:  # what it holds does not matter
            layer.update_and_fetch(*(mx.zeros((1, 2, length, 16), mx.bfloat16) for _ in range(2)))
        rows.add(new_request([30] * length).rows[0], cache)
        for _ in range(2):
            mx.eval(step(model, rows))
    return rows


def step(model: TextModel, layout: Layout) -> list[mx.array]:
    return [
        run_pass(
            model, each, mx.array([30] * len(each.rows)), [row.length for row in each.rows]
        ).logits
        for each in layout.passes()
    ]


def nodes(folder: Path, *arrays: mx.array) -> list[str]:
    """Operations that are still to be run for these arrays, but views."""
    graph = folder / "step.dot"
    mx.export_to_dot(str(graph), *arrays)
    names = re.findall(r'label ?= ?"([A-Za-z0-9_]+)"', graph.read_text())
    return [name for name in names if len(name) > 1 and name not in VIEWS]  # arrays have a letter


def kernels(model: TextModel, layout: Layout, folder: Path) -> int:
    """Those of the next step."""
    return len(nodes(folder, *step(model, layout)))


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


@pytest.mark.parametrize("lengths", [(5, 20, 40), (5, 20, 700, 800)])
def test_a_step_leaves_nothing_to_compute(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """Not even where the model, which is given its positions, never asks for the offsets."""
    model = load(build(tmp_path / "model", "qwen3_5"), LoadOptions())
    engine = new_engine(model, max_chunk=1024)
    for length in lengths:
        engine.submit(new_request([20] * length, max_tokens=100))
    for _ in range(20):
        engine.step()
    groups = engine.batch.layout.rows.groups
    counts = [layer.offset for g in groups for layer in g.cache if hasattr(layer, "offset")]
    asked = [count for count in counts if isinstance(count, mx.array)]
    assert asked
    assert not nodes(tmp_path, *asked)
