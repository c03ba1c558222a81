"""Weights in another dtype: the same model, within the memory that was predicted."""

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from equipped import load_by_family
from greedy import start
from mlx_provider import LoadedModel
from mlx_provider.families.layers import expand
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.serving.weight_files import weights_dtype, weights_estimate
from mlx_provider.serving.weights import WeightsKey
from quantised import FILE, GROUP, quantise
from tiny import build
from tolerances import logprob_tolerance

FAMILIES = ("qwen3", "deepseek_v3", "gpt_oss", "qwen3_vl", "qwen3_5_moe")
"""Text, latent attention with experts, experts with biases, vision, vision with experts."""


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model in four bits by family name."""

    @cache
    def get(name: str) -> Path:
        folder = build(tmp_path_factory.mktemp("four") / name, name)
        return quantise(folder, name, dtype="float32")

    return get


def load(folder: Path, dtype: str | None = None) -> LoadedModel:
    return load_by_family(folder, dtype=dtype)


def logits(model: LoadedModel) -> mx.array:
    messages = [{"role": "user", "content": "Hello there"}]
    prompt = model.prepare(messages, tools=[], media=[], variables={})
    return start(model, prompt).logits.astype(mx.float32)


def layers(model: Any) -> set[str]:
    return {type(layer).__name__ for _, layer in model.model.named_modules()}


@pytest.mark.parametrize("family", FAMILIES)
def test_expanding_to_float32_leaves_no_quantised_layer_and_equal_logits(
    family: str, four_bits: Callable[[str], Path]
) -> None:
    native, wide = load(four_bits(family)), load(four_bits(family), "float32")
    assert any(name.startswith("Quantized") for name in layers(native))
    assert not any(name.startswith("Quantized") for name in layers(wide))
    assert wide.info.precision == "float32"
    assert wide.info.fingerprint != native.info.fingerprint
    assert mx.allclose(logits(wide), logits(native), atol=logprob_tolerance())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe", "gemma3"])
def test_bfloat16_weights_expand_to_float32(family: str, tmp_path: Path) -> None:
    folder = build(tmp_path / "m", family, dtype="bfloat16")
    native, wide = load(folder).info, load(folder, "float32")
    assert (native.precision, wide.info.precision) == ("low", "float32")
    weights = dict(tree_flatten(wide.model.parameters()))  # type: ignore[attr-defined]
    assert {value.dtype for value in weights.values()} <= {mx.float32, mx.int32}
    reference = build(tmp_path / "r", family, dtype="bfloat16")
    whole = {
        name: value.astype(mx.float32) for name, value in mx.load(str(reference / FILE)).items()
    }
    mx.save_safetensors(str(reference / FILE), whole, metadata={"format": "mlx"})
    assert mx.allclose(logits(wide), logits(load(reference)), atol=logprob_tolerance())


def test_expanded_weights_are_not_rounded_to_the_dtype_of_the_scales(tmp_path: Path) -> None:
    folder = quantise(build(tmp_path / "m", "qwen3"), "qwen3", dtype="bfloat16")
    saved = mx.load(str(folder / FILE))
    assert isinstance(saved, dict)
    name = "model.layers.0.mlp.up_proj"
    factors = [saved[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases")]
    exact = mx.dequantize(saved[f"{name}.weight"], *factors, group_size=GROUP, bits=4)
    wide = load(folder, "float32").model.model.layers[0].mlp.up_proj  # type: ignore[attr-defined]
    assert mx.array_equal(wide.weight, exact)


def test_a_layer_with_other_arrays_stays_quantised() -> None:
    nvfp4 = {"bias": False, "group_size": 16, "mode": "nvfp4"}
    shifted = nn.QuantizedLinear(64, 64)
    shifted.shift = mx.ones(64)
    for layer in (QuantizedSwitchLinear(32, 16, 3, **nvfp4, global_scale=True), shifted):
        model = nn.Sequential(layer)
        expand(model, "float32")
        assert model.layers[0] is layer


def test_a_quantised_layer_that_a_model_keeps_in_float32_stays_float32() -> None:
    model = nn.Sequential(nn.QuantizedLinear(64, 64))
    model.cast_predicate = lambda name: False
    expand(model, "bfloat16")
    assert model.layers[0].weight.dtype == mx.float32


def test_parameters_that_a_model_keeps_in_float32_stay_float32(tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "qwen3_5_text")
    weights = dict(tree_flatten(load(folder, "bfloat16").model.parameters()))  # type: ignore[attr-defined]
    wide = {name for name, value in weights.items() if value.dtype == mx.float32}
    assert wide
    assert all(name.endswith("A_log") for name in wide)


@pytest.mark.parametrize(
    ("family", "source"),
    [
        pytest.param(family, source, marks=() if (i + j) % 2 == 0 else pytest.mark.sweep)
        for i, family in enumerate([*FAMILIES, "gemma3"])
        for j, source in enumerate(["four", "bfloat16", "float32"])
    ],
)
def test_the_estimate_of_expanded_weights_equals_the_memory_taken(
    family: str, source: str, tmp_path: Path, four_bits: Callable[[str], Path]
) -> None:
    folder = four_bits(family) if source == "four" else build(tmp_path / "m", family, dtype=source)
    for dtype, size in (("float32", 4), (None, None)):
        gc.collect()
        before = mx.get_active_memory()
        model = load(folder, dtype)
        taken = mx.get_active_memory() - before
        estimate = weights_estimate(folder, expanded=size)
        assert 0.9 < estimate / model.info.weights_bytes < 1.1
        assert 0.9 < estimate / taken < 1.1
        del model


@pytest.mark.parametrize(
    ("tensors", "weights"),
    [
        ({"a.qweight": ((64, 16), mx.int32), "a.scales": ((2, 128), mx.float16)}, 8192),
        ({"a.weight_packed": ((64, 16), mx.int32), "a.weight_scale": ((64, 4), mx.bfloat16)}, 8192),
        ({"a.up_proj_blocks": ((2, 64, 4, 16), mx.uint8), "a.up_proj_bias": ((2, 64), mx.bfloat16)},
         16384),
    ],
)  # fmt: skip
def test_weights_that_loading_unpacks_are_counted_unpacked(
    tensors: dict[str, Any], weights: int, tmp_path: Path
) -> None:
    arrays = {name: mx.zeros(shape, dtype) for name, (shape, dtype) in tensors.items()}
    mx.save_safetensors(str(tmp_path / FILE), arrays)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "x"}}')
    assert 1 <= weights_estimate(tmp_path, expanded=4) / (4 * weights) < 1.1


@pytest.mark.parametrize("told", ["[]", "null", '"4 bit"', '{"group_size": null}', '{"a": false}'])
def test_a_bad_quantization_entry_does_not_break_the_estimate(told: str, tmp_path: Path) -> None:
    arrays = {"a.weight": mx.zeros((4, 8), mx.uint32), "a.scales": mx.zeros((4, 1))}
    mx.save_safetensors(str(tmp_path / FILE), arrays)
    (tmp_path / "config.json").write_text(f'{{"quantization": {told}}}')
    assert weights_estimate(tmp_path, expanded=4) == 4 * 64 * 4


def test_dtype_auto_is_native_if_float32_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert weights_dtype("auto", 50, 100) == "float32"
    assert weights_dtype("auto", 51, 100) is None
    assert weights_dtype("native", 1, 100) is None
    assert weights_dtype("float16", 1000, 100) == "float16"
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert weights_dtype("auto", 50, 100) is None


def test_models_with_different_dtypes_do_not_share_weights(tmp_path: Path) -> None:
    def key(**options: Any) -> WeightsKey:
        return WeightsKey.of(tmp_path, ModelOptions(**options))

    assert key() == key(dtype="auto")
    assert len({key(), key(dtype="native"), key(dtype="bfloat16"), key(dtype="float32")}) == 4
