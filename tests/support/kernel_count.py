"""How many kernels a decode step launches, counted on the graph that it builds.

Where a GPU has one fused kernel the graph gets one node; views launch none. Host and device pay for
every launch, in every layer of every step.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_provider.engine.execution import batch_layout
from mlx_provider.engine.execution.batch_layout import Layout
from mlx_provider.engine.execution.decode_batch import run_pass
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import LoadOptions
from mlx_provider.testing.driver import new_request
from mlx_provider.upstream.shared_kv import divide
from replaced import Replaced
from tiny import build

LAYERS = 36
"""As many as Qwen3-8B has."""
ALIKE = (300,) * 8
PAIRS = (260, 260, 560, 560, 1200, 1200, 2500, 2500)
"""Of lengths that make four groups."""
FOUR_GROUPS = 1.65
"""Times the kernels of one group that a step of four may launch."""
EIGHT_GROUPS = 2.05
"""The same of eight rows, each in a group of its own."""
VIEWS = {"Slice", "Reshape", "Transpose", "Broadcast", "Squeeze", "ExpandDims", "AsStrided",
         "Flatten", "Unflatten", "View", "BroadcastAxes", "Split", "Depends"}  # fmt: skip


def deep_model(folder: Path) -> TextModel:
    """In bfloat16, for which nothing is evaluated while a step is built."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "hidden_size": 32,
        "intermediate_size": 32,
    }
    return load_text(build(folder, "qwen3", dtype="bfloat16", **sizes), LoadOptions())


@contextmanager
def fused() -> Iterator[Replaced]:
    """Operations that a CPU build makes of several nodes are one, with the same inputs."""

    def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return mx.abs(x)

    def rope(x: mx.array, *args: Any, offset: Any, **more: Any) -> mx.array:
        turned = mx.sin(x)
        return mx.depends(turned, [offset]) if isinstance(offset, mx.array) else turned

    def attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any, **more: Any) -> mx.array:
        read = [k, v, *([mask] if isinstance(mask, mx.array) else [])]
        found: mx.array = mx.depends(mx.cos(q), read)
        return found

    with Replaced() as patch:
        patch.setattr(mx.fast, "rms_norm", rms_norm)
        patch.setattr(mx.fast, "rope", rope)
        patch.setattr(mx.fast, "scaled_dot_product_attention", attention)
        yield patch


def rows_apart(patch: Replaced) -> None:
    """Each row that joins from here on has a group of its own."""
    patch.setattr(batch_layout, "MERGED_BYTES", 0)


def filled(
    model: TextModel, lengths: Sequence[int], layout: str = "grouped", prefix: int = 0
) -> Layout:
    """Rows of these lengths that joined one after another, a step between. `prefix`: tokens of each
    that are in another buffer."""
    rows = Layout(layout)
    for length in lengths:
        cache = model.make_cache()
        for layer in cache:  # what it holds does not matter
            layer.update_and_fetch(*(mx.zeros((1, 2, length, 16), mx.bfloat16) for _ in range(2)))
            if prefix:
                divide(layer, prefix)
        rows.add(new_request([30] * length).rows[0], cache)
        for _ in range(2):
            mx.eval(step(model, rows))
    return rows


def kernels(model: TextModel, layout: Layout) -> int:
    """Those of the next step."""
    return len(nodes(*step(model, layout)))


def nodes(*arrays: mx.array) -> list[str]:
    """Operations that are still to be run for these arrays, but views."""
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "step.dot"
        mx.export_to_dot(str(graph), *arrays)
        text = graph.read_text()
    names = re.findall(r'label ?= ?"([A-Za-z0-9_]+)"', text)
    return [name for name in names if len(name) > 1 and name not in VIEWS]  # arrays have a letter


def step(model: TextModel, layout: Layout) -> list[mx.array]:
    """Logits of the next step, before any of it is computed."""
    return [
        run_pass(
            model, each, mx.array([30] * len(each.rows)), [row.length for row in each.rows]
        ).logits
        for each in layout.passes()
    ]
