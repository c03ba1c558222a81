"""The number of kernels that a decode step launches, counted on its graph."""

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from buffer_count import DEFAULT, OURS, Real, buffers, operations
from kernel_count import (
    ALIKE,
    EIGHT_GROUPS,
    FOUR_GROUPS,
    LAYERS,
    PAIRS,
    deep_model,
    filled,
    fused,
    kernels,
    nodes,
    rows_apart,
    step,
)
from mlx_provider import LoadOptions, PrefillChunk, Prompt
from mlx_provider.engine.execution.batch_layout import Layout
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.testing.driver import new_engine, new_request
from mlx_provider_qwen3_5 import load
from replaced import Replaced
from tiny import build


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return deep_model(tmp_path_factory.mktemp("deep") / "qwen3")


@pytest.fixture
def fusing() -> Iterator[Replaced]:
    with fused() as patch:
        yield patch


def test_rows_in_separate_caches_launch_little_more_than_merged_rows(
    deep: TextModel, fusing: Replaced
) -> None:
    together = kernels(deep, filled(deep, ALIKE))
    assert together <= 20 * LAYERS + 10
    four = filled(deep, PAIRS)
    assert len(four.passes()) == 1
    assert kernels(deep, four) <= FOUR_GROUPS * together
    rows_apart(fusing)
    eight = filled(deep, ALIKE)
    assert len(eight.passes()) == 1
    assert kernels(deep, eight) <= EIGHT_GROUPS * together


SIXTEEN = tuple(120 * (i + 1) for i in range(16))


def test_sixteen_unlike_rows_launch_little_more_than_one_where_rows_are_padded(
    deep: TextModel, fusing: Replaced
) -> None:
    """Up to 2,000 tokens, at most three operations more in each layer. A longer row stays apart."""
    one = kernels(deep, filled(deep, (700,)))
    padded = filled(deep, SIXTEEN, "padded")
    assert kernels(deep, padded) - one <= 3 * LAYERS
    assert kernels(deep, filled(deep, SIXTEEN)) - one > 3 * LAYERS, "otherwise it proves nothing"
    assert len(filled(deep, (700, 2000, 9000), "padded").groups) == 2


@pytest.mark.sweep
@pytest.mark.parametrize(("rows", "most"), [(1, 700), (8, 1500)])
def test_a_row_in_two_buffers_launches_too_many_kernels_to_avoid_a_copy(
    rows: int, most: int, deep: TextModel, fusing: Replaced
) -> None:
    """28 more in each layer for each row; with fewer, an entry could grow by a second buffer."""
    rows_apart(fusing)
    whole, apart = (filled(deep, (600,) * rows, prefix=prefix) for prefix in (0, 500))
    one = kernels(deep, whole)
    assert one <= most
    assert kernels(deep, apart) - one == 28 * rows * LAYERS


DENSE = Real(weights=8.2e9, token=1024, wider=128)
UNLIKE = (25, 50, 100, 200, 400, 800, 1600, 3000)
"""Tokens of 8 rows, a twentieth of 500 to 60,000."""
BUFFERS = {
    "one row of 60,000": ((3000,), 110, 18),
    "eight alike of 8,000": ((400,) * 8, 110, 19),
    "eight of 500 to 60,000": (UNLIKE, 254, 36),
    "eight of 60,000": ((3000,) * 8, 866, 97),
}
"""Of a step of a dense 8B model, with MLX's limits and with ours, at the most. The last has 36e9
elements of keys and values, of which a buffer takes 0.42e9."""


@pytest.mark.parametrize(
    "rows", [*list(BUFFERS)[:3], pytest.param([*BUFFERS][3], marks=pytest.mark.sweep)]
)
def test_a_step_takes_few_command_buffers(rows: str, deep: TextModel, fusing: Replaced) -> None:
    lengths, usual, most = BUFFERS[rows]
    if len(set(lengths)) > 1 or lengths == (3000,) * 8:
        rows_apart(fusing)
    found = operations(deep, filled(deep, lengths), DENSE)
    assert buffers(found, OURS) <= most
    assert 0.9 * usual <= buffers(found, DEFAULT) <= usual


SPARSE = (
    ("gpt_oss", ["sliding_attention", "full_attention"] * 12, Real(20.9e9, 512, 45), 9),
    ("qwen3_5_text", (["linear_attention"] * 3 + ["full_attention"]) * 8, Real(9e9, 1024, 64), 8),
)
"""A mixture of experts and a hybrid, with the buffers of a step of one, or of eight rows of 5,000
tokens, alike or not."""


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "layers", "real", "most"), SPARSE)
def test_a_step_of_experts_and_of_recurrent_layers_takes_few_command_buffers(
    name: str, layers: list[str], real: Real, most: int, tmp_path: Path, fusing: Replaced
) -> None:
    fusing.setattr(mx, "contiguous", mx.abs)  # also one operation, which can be exported
    sizes: dict[str, Any] = {"num_hidden_layers": len(layers), "layer_types": layers}
    folder = build(tmp_path / "model", name, dtype="float32", **sizes)
    model = load_text(folder, LoadOptions(dtype="float32"))
    for rows in (1, 8):
        assert buffers(operations(model, prefilled(model, [5] * rows), real), OURS) <= most
    rows_apart(fusing)
    assert buffers(operations(model, prefilled(model, [5] * 8), real), OURS) <= most


LAUNCHES = {
    "qwen3": (60, 68, 127),
    "gpt_oss": (139, 156, 228),
    "gemma3_text": (97, 114, 186),
    "qwen3_5_text": (107, 114, 152),
}
"""Of a step of one row, of eight in one group, and of eight in eight groups, at the most: of tiny
models that are dense, a mixture of experts, one with windows, and a hybrid."""
MASKS = 15
"""Operations for the masks of a step, however many layers use them."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_step_launches_no_more_kernels_than_recorded(
    name: str, tmp_path: Path, fusing: Replaced
) -> None:
    folder = build(tmp_path / "model", name, dtype="float32")
    model = load_text(folder, LoadOptions(dtype="float32"))
    found = [kernels(model, prefilled(model, [5] * rows)) for rows in (1, 8)]
    padded = prefilled(model, range(5, 69, 4), "padded")
    assert (len(padded.groups), len(padded.groups[0].rows)) == (1, 16)
    assert kernels(model, padded) - found[0] <= 3 * len(model.make_cache()) + MASKS
    rows_apart(fusing)
    found.append(kernels(model, prefilled(model, [5] * 8)))
    for launched, most in zip(found, LAUNCHES[name], strict=True):
        assert launched <= most


@pytest.mark.parametrize("plugin", ["gemma3", "qwen3_vl", "qwen3_5"])
def test_sixteen_unlike_rows_of_a_vision_model_launch_little_more_than_one(
    plugin: str, tmp_path: Path, fusing: Replaced
) -> None:
    """Of its text part. Windows are shorter than most of these rows."""
    module = importlib.import_module(f"mlx_provider_{plugin}")
    folder = build(tmp_path / "model", plugin, dtype="float32")
    model = next(iter(module.mlx_model_families())).load(folder, LoadOptions(dtype="float32"))
    one = kernels(model, prefilled(model, [25]))
    padded = prefilled(model, range(5, 69, 4), "padded")
    assert [len(group.rows) for group in padded.groups] == [16]
    assert kernels(model, padded) - one <= 3 * len(model.make_cache()) + MASKS


def prefilled(model: TextModel, lengths: Iterable[int], layout: str = "grouped") -> Layout:
    """Rows of these lengths that joined one after another, each with its own prompt."""
    rows = Layout(layout)
    for length in lengths:
        cache = model.make_cache()
        mx.eval(model.prefill(PrefillChunk(Prompt([30] * length), 0, length, cache)))
        rows.add(new_request([30] * length).rows[0], cache)
        mx.eval(step(model, rows))
    return rows


@pytest.mark.parametrize("lengths", [(5, 20, 40), (5, 20, 700, 800)])
def test_a_step_leaves_no_lazy_arrays(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """Not even if the model gets its positions and never reads the offsets."""
    model = load(build(tmp_path / "model", "qwen3_5"), LoadOptions())
    engine = new_engine(model, max_chunk=1024)
    for length in lengths:
        engine.submit(new_request([20] * length, max_tokens=100))
    for _ in range(20):
        engine.step()
    groups = engine.batch.layout.groups
    counts = [layer.offset for g in groups for layer in g.cache if hasattr(layer, "offset")]
    asked = [count for count in counts if isinstance(count, mx.array)]
    assert asked
    assert not nodes(*asked)
