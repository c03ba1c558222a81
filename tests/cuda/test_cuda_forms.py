"""The forms in which layers call MLX's quantised product with the plugin `cuda`.

These tests run its functions on this machine's CPU: they prove results and forms, not speed.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import switch_layers as mlx_lm_experts
from mlx_vlm.models import switch_layers as mlx_vlm_experts

from greedy import features_of
from kernel_count import step
from mlx_provider import LoadOptions, PrefillChunk, Prompt
from mlx_provider.engine.execution.batch_layout import Layout
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.serving.engine_builder import cache_maker
from mlx_provider.serving.loader import install, remove
from mlx_provider.serving.probe import probe
from mlx_provider.testing.driver import new_request
from mlx_provider_cuda import matches, replacements
from mlx_provider_cuda.forms import DEQUANTISE, TILE
from noted_calls import note_calls
from tiny import build
from tiny.models import tiny_image
from tolerances import logprob_tolerance
from unpatched import Unpatched

SIZE, OUT = 64, 32
REPLACEMENTS = tuple(replacements())


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the inputs of all quantised products."""
    return note_calls(monkeypatch, mx, "quantized_matmul", lambda x, *_, **more: tuple(x.shape))


@pytest.fixture
def patched() -> Iterator[None]:
    model = nn.Module()
    importlib.import_module("mlx_lm.models.mla")  # as a model with such layers does
    install("test", REPLACEMENTS, model)
    yield
    remove("test", REPLACEMENTS, model)
    assert not hasattr(nn.QuantizedLinear.__call__, "patch")


def layer(bits: int, *, bias: bool) -> nn.QuantizedLinear:
    mx.random.seed(1)
    return nn.QuantizedLinear(SIZE, OUT, bias=bias, group_size=32, bits=bits)


SHAPES = [(1, 1), (1, 5), (3, 1), (16, 1), (2, 3), (4, 8), (1, DEQUANTISE), (3, 70)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_replaced_products_equal_the_original(
    shape: tuple[int, int], bits: int, request: pytest.FixtureRequest
) -> None:
    one = layer(bits, bias=bits == 4)
    table = nn.QuantizedEmbedding(40, SIZE, group_size=32, bits=bits)
    x = mx.random.normal((*shape, SIZE))
    wanted = one(x), table.as_linear(x)
    request.getfixturevalue("patched")
    for found, expected in zip((one(x), table.as_linear(x)), wanted, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert mx.allclose(found, expected, atol=logprob_tolerance())


@pytest.mark.usefixtures("patched")
def test_rows_are_multiplied_as_one_matrix_of_at_least_a_tile(forms: list[tuple[int, ...]]) -> None:
    one = layer(4, bias=True)
    for shape in SHAPES:
        mx.eval(one(mx.zeros((*shape, SIZE))))
    rows = [a * b for a, b in SHAPES if 1 < a * b < DEQUANTISE]
    assert forms == [(1, 1, SIZE), *((1, max(TILE, n), SIZE) for n in rows)]


def test_the_plugin_is_for_cuda_alone() -> None:
    assert [matches(device, "low") for device in ("cpu", "metal", "cuda")] == [False, False, True]


LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}


PLAIN = ("qwen3", "gpt_oss", "qwen3_5_text")


@pytest.mark.parametrize(
    ("family", "plugin"), [*((f, p) for f in PLAIN for p in (True, False)), ("deepseek_v3", True)]
)
def test_every_product_of_a_decode_step_is_one_matrix(
    family: str,
    plugin: bool,
    tmp_path: Path,
    forms: list[tuple[int, ...]],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention's, the MLP's, those of recurrent layers, and the output's. Experts of few rows
    gather their weights by row (`mx.gather_qmm`): one call for the rows of each product. Metal
    needs no plugin for contiguous rows (backend/metal/quantized.cpp: `non_batched`)."""
    if plugin:
        request.getfixturevalue("patched")
    sizes = LATENT if family == "deepseek_v3" else {}
    folder = build(tmp_path / "model", family, dtype="float32", **sizes)
    model = load_text(folder, LoadOptions(dtype="float32"))
    nn.quantize(model.model, group_size=32, bits=4, class_predicate=_divisible)
    rows = prefilled(model, 16, "padded" if plugin else "grouped")
    products, gathers = (
        note_calls(monkeypatch, mx, name, lambda x, *_, **more: memoryview(x).c_contiguous)
        for name in ("quantized_matmul", "gather_qmm")
    )
    forms.clear()
    mx.eval(step(model, rows))
    assert all(products + gathers)
    forms = [(form[0], form[-2]) for form in forms]
    assert set(forms) == {(1, 16) if plugin else (16, 1)}
    experts = [layer for _, layer in model.model.named_modules() if "SwitchLinear" in kind(layer)]
    assert len(gathers) == len(experts)
    assert bool(experts) == (family in ("gpt_oss", "deepseek_v3"))


@pytest.mark.parametrize("module", [mlx_lm_experts, mlx_vlm_experts])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_many_sorted_rows_are_one_matrix_for_each_expert(
    module: Any,
    bits: int,
    bias: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 8 for each on average. MLX's CUDA backend computes `gather_qmm` row by row, but
    `gather_mm` of sorted rows expert by expert."""
    mx.random.seed(1)
    one = module.SwitchLinear(SIZE, OUT, 4, bias=bias)
    if bias:
        one.bias = mx.random.normal(one.bias.shape)
    one = one.to_quantized(group_size=32, bits=bits)
    x = mx.random.normal((64, 1, SIZE))
    indices = mx.sort(mx.random.randint(0, 4, (64,)))
    cases = [
        (rows, in_order) for rows in (TILE * 4 - 1, TILE * 4, 64) for in_order in (True, False)
    ]

    def run(rows: int, in_order: bool) -> mx.array:
        return one(x[:rows], indices[:rows], sorted_indices=in_order)

    wanted = [run(*case) for case in cases]
    request.getfixturevalue("patched")
    gathers = [
        note_calls(monkeypatch, mx, name, lambda x, *_, **more: tuple(x.shape))
        for name in ("gather_qmm", "gather_mm")
    ]
    for case, expected in zip(cases, wanted, strict=True):
        for noted in gathers:
            noted.clear()
        found = run(*case)
        matrices = case[1] and case[0] >= TILE * 4
        assert [len(noted) for noted in gathers] == ([0, 1] if matrices else [1, 0])
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert mx.allclose(found, expected, atol=logprob_tolerance())


def test_experts_of_a_prompt_are_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """All products of a chunk's experts; its logits are those without the plugin."""
    model = load_text(build(tmp_path / "model", "gpt_oss", dtype="float32"), LoadOptions())
    nn.quantize(model.model, group_size=32, bits=4, class_predicate=_divisible)

    def logits() -> mx.array:
        chunk = PrefillChunk(Prompt([5 + i % 20 for i in range(64)]), 0, 64, model.make_cache())
        return model.prefill(chunk)

    expected = logits()
    request.getfixturevalue("patched")
    one_by_one, gathers = (
        note_calls(monkeypatch, mx, name, lambda x, *_, **more: tuple(x.shape))
        for name in ("gather_qmm", "gather_mm")
    )
    assert mx.allclose(logits(), expected, atol=logprob_tolerance())
    experts = [each for _, each in model.model.named_modules() if "SwitchLinear" in kind(each)]
    assert len(gathers) == len(experts) > 0
    assert not one_by_one


@pytest.mark.parametrize("prefix", [0, 256, 300])
def test_prompts_of_many_lengths_have_few_shapes_of_attention(
    prefix: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a prefix makes the number of keys new anyway. Results are those without the plugin."""
    qwen3 = load_text(build(tmp_path / "model", "qwen3", dtype="float32"), LoadOptions())
    lengths = [prefix + more for more in (3, 17, 24, 30)]

    def logits(total: int) -> list[mx.array]:
        prompt, cache = Prompt([5 + i % 200 for i in range(total + 2)]), qwen3.make_cache()
        ends = [*filter(None, (prefix,)), total, total + 2]
        chunks = zip([0, *ends], ends, strict=False)
        return [qwen3.prefill(PrefillChunk(prompt, *chunk, cache)) for chunk in chunks]

    with Unpatched(qwen3.model):
        expected = [*map(logits, lengths)]
    shapes = note_calls(
        monkeypatch, mx.fast, "scaled_dot_product_attention",
        lambda q, k, v, **more: (q.shape[-2], k.shape[-2]),
    )  # fmt: skip
    with Unpatched(qwen3.model):
        install("test", REPLACEMENTS, qwen3.model)
        found = [*map(logits, lengths)]
        remove("test", REPLACEMENTS, qwen3.model)
    for logits_of, wanted in zip(found, expected, strict=True):
        assert mx.allclose(mx.stack(logits_of), mx.stack(wanted), atol=logprob_tolerance())
    widths = {shape for shape in shapes if 2 < shape[0] < 256}
    assert (widths == {(3, prefix + 3), (32, prefix + 32)}) == (prefix % 256 == 0)


def kind(layer: nn.Module) -> str:
    return type(layer).__name__


@pytest.mark.parametrize("plugin", ["gemma3", "qwen3_vl", "qwen3_5"])
@pytest.mark.usefixtures("patched")
def test_every_product_of_a_vision_tower_is_one_matrix(
    plugin: str, tmp_path: Path, forms: list[tuple[int, ...]]
) -> None:
    """All patches of an image."""
    module = importlib.import_module(f"mlx_provider_{plugin}")
    folder = build(tmp_path / "model", plugin, dtype="float32")
    model = next(iter(module.mlx_model_families())).load(folder, LoadOptions(dtype="float32"))
    nn.quantize(model.model, group_size=32, bits=4, class_predicate=_divisible)
    message = {"role": "user", "content": [{"type": "image"}]}
    prompt = model.prepare([message], tools=[], media=[tiny_image(1)], variables={})
    forms.clear()
    (features,) = features_of(model, prompt).values()
    mx.eval(features.rows)
    assert forms
    assert all(leading == 1 and tokens >= TILE for leading, tokens, _ in forms)


def _divisible(path: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0


def prefilled(model: TextModel, rows: int, name: str) -> Layout:
    layout = Layout(name)
    for i in range(rows):
        cache, tokens = model.make_cache(), [30] * (3 + 5 * i)
        mx.eval(model.prefill(PrefillChunk(Prompt(tokens), 0, len(tokens), cache)))
        layout.add(new_request(tokens).rows[0], cache)
    return layout


def test_quantised_keys_are_multiplied_as_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA has no product with them. Rows share passes and prefixes, with drafts and chunks."""

    def refuse(*args: Any, **kwargs: Any) -> mx.array:
        raise RuntimeError("No implementation for problem shape 64x64x32x4")

    folder = build(tmp_path / "model", "qwen3", dtype="float32", head_dim=64)
    model = load_text(folder, LoadOptions(dtype="float32"))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx, "quantized_matmul", refuse)
    found = probe(model, cache_maker(model, 8), model.kv_layouts)
    assert (found.layout, found.notes) == ("grouped", ())
    assert found.mixes
    assert found.drafts
    assert found.shares
    assert found.padded
