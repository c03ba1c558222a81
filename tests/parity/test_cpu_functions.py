"""Our stand-ins on the CPU against upstream's functions, and where they stand in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers import activations
from mlx_lm.models import qwen3
from mlx_lm.models.activations import precise_swiglu, swiglu
from mlx_vlm.models import activations as vlm_activations
from mlx_vlm.models.base import ensure_fused_sdpa
from mlx_vlm.models.qwen3_5 import language

from mlx_provider.records import LoadOptions
from mlx_provider.testing.tiny_models import build
from mlx_provider.upstream import attention, cpu_attention, cpu_device, cpu_functions, mlx_lm
from mlx_provider.upstream.stand_in import Pristine, stand_in
from mlx_provider_qwen3_5 import load

pytestmark = pytest.mark.skipif(not cpu_device.in_use(), reason="MLX is fast there")
UPSTREAM = [
    (activations.gelu_approx, 1),
    (swiglu, 2),
    (vlm_activations.swiglu, 2),
    (precise_swiglu, 3),
    (language._precise_swiglu, 3),
]


def pristine(function):
    """Another test's model may have had it replaced."""
    return getattr(function, "pristine", function)


@pytest.mark.parametrize(("function", "arguments"), UPSTREAM)
def test_large_arrays_are_ours_and_equal(function, arguments, monkeypatch):
    original = pristine(function)
    asked = []
    monkeypatch.setattr(mx, "eval", lambda *arrays, real=mx.eval: (asked.append(1), real(*arrays)))
    ours = cpu_functions._ours(original)
    assert ours is not None
    given = [8 * mx.random.normal((40, 512)) for _ in range(arguments)]
    given[-1][0, :3] = mx.array([-200.0, 200.0, 0.0])
    given[-2 if arguments > 1 else -1][0, :3] = mx.array([-200.0, 200.0, 0.0])
    found = ours(*given)
    assert asked
    assert found.dtype == mx.float32
    assert mx.allclose(found, original(*given), rtol=1e-5, atol=1e-6).item()


@pytest.mark.parametrize(("function", "arguments"), UPSTREAM)
def test_small_arrays_and_halves_are_upstreams(function, arguments):
    original = pristine(function)
    ours = cpu_functions._ours(original)
    assert ours is not None
    for shape, dtype in (((4, 16), mx.float32), ((40, 512), mx.bfloat16)):
        given = [mx.random.normal(shape).astype(dtype) for _ in range(arguments)]
        assert mx.array_equal(ours(*given), original(*given)).item()


def test_vision_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    attend = cpu_attention.attend
    monkeypatch.setattr(
        cpu_attention, "attend", lambda *a, **k: (asked.append(a[0].shape[2]), attend(*a, **k))[1]
    )
    original = pristine(ensure_fused_sdpa)
    ours = cpu_functions._ours(original)
    assert ours is not None
    for patches in (10, 300):
        given = [mx.random.normal((1, 4, patches, 32)) for _ in range(3)]
        expected = original(*given, 0.3)
        assert mx.allclose(ours(*given, 0.3), expected, rtol=1e-4, atol=1e-5).item()
    assert asked == [300]


def test_rows_of_several_lengths_are_attended_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    original = pristine(language._qwen3_5_left_padded_attention)
    ours = cpu_functions._ours(original)
    assert ours is not None
    stand_in([language], attention.NAME, attention.routed)  # as every model that is loaded
    cache = SimpleNamespace(_qwen3_5_decode_left_padding=[0, 3, 7])
    for length in (9, 200):  # MLX's attention, and NumPy's
        queries = mx.random.normal((3, 8, 1, 32))
        keys, values = (mx.random.normal((3, 4, length, 32)) for _ in range(2))
        given = {"cache": cache, "scale": 0.3, "mask": None}
        expected = original(queries, keys, values, **given)
        with monkeypatch.context() as patch:
            patch.delattr(mx, "take")  # upstream's way to a row
            found = ours(queries, keys, values, **given)
        assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5).item()


def test_several_tokens_a_row_are_attended_as_upstream_does() -> None:
    original = pristine(language._qwen3_5_left_padded_attention)
    ours = cpu_functions._ours(original)
    assert ours is not None
    queries = mx.random.normal((2, 4, 2, 32))
    keys, values = (mx.random.normal((2, 4, 9, 32)) for _ in range(2))
    cache = SimpleNamespace(_qwen3_5_decode_left_padding=[0, 3])
    given = {"cache": cache, "scale": 0.3, "mask": None}
    expected = original(queries, keys, values, **given)
    assert mx.array_equal(ours(queries, keys, values, **given), expected).item()


def test_a_function_of_the_same_name_is_left_alone() -> None:
    def swiglu(x, gate, alpha):  # another one's
        return x

    assert cpu_functions._ours(swiglu) is None


def test_they_are_put_in_once_and_back(tmp_path: Path) -> None:
    model = mlx_lm.load(build(tmp_path / "model", "qwen3")).model
    cpu_functions.adopt(model)
    ours = qwen3.swiglu
    assert ours is not swiglu
    assert ours.pristine is pristine(swiglu)
    cpu_functions.adopt(model)
    assert qwen3.swiglu is ours
    with Pristine(model):
        assert qwen3.swiglu is ours.pristine
    assert qwen3.swiglu is ours


def test_a_vision_model_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pristine(language._qwen3_5_left_padded_attention)
    monkeypatch.setattr(language, "_qwen3_5_left_padded_attention", original)
    load(build(tmp_path / "model", "qwen3_5"), LoadOptions())
    assert language._qwen3_5_left_padded_attention.pristine is original


def test_a_layer_of_mlx_calls_ours() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU(approx="tanh")

    block = Block()
    x = mx.random.normal((40, 512))
    with Pristine(block):
        expected = block.act(x)
    cpu_functions.adopt(block)
    assert hasattr(activations.gelu_approx, "pristine")
    assert mx.allclose(block.act(x), expected, rtol=1e-5, atol=1e-6).item()
