"""NumPy's functions against upstream's, and where they take their place."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers import activations
from mlx_lm.models import qwen3
from mlx_lm.models.activations import precise_swiglu, swiglu
from mlx_vlm.models import activations as vlm_activations
from mlx_vlm.models.base import ensure_fused_sdpa
from mlx_vlm.models.qwen3_5 import language

from mlx_provider import LoadOptions
from mlx_provider.families.text import load_text
from mlx_provider.records import Part, Parts, Run
from mlx_provider.serving.loader import _make_function, install, remove
from mlx_provider_cpu import attention
from mlx_provider_cpu.functions import REPLACEMENTS
from mlx_provider_qwen3_5 import load as load_qwen3_5
from tiny import build
from unpatched import Unpatched, original_of

Install = Callable[[Any], None]
UPSTREAM = [
    (activations.gelu_approx, 1),
    (swiglu, 2),
    (vlm_activations.swiglu, 2),
    (precise_swiglu, 3),
    (language._precise_swiglu, 3),
]


def ours_of(original: Any) -> Any:
    made = [found for each in REPLACEMENTS if (found := _make_function(each, original)) is not None]
    return made[0] if made else None


@pytest.fixture
def installed() -> Iterator[Install]:
    """Put the replacements into a model's modules; they are taken out with the test."""
    models: list[Any] = []

    def put_in(model: Any) -> None:
        models.append(model)
        remove("cpu", REPLACEMENTS, model)  # which an engine of another test may have left
        install("test", REPLACEMENTS, model)

    yield put_in
    for model in models:
        remove("test", REPLACEMENTS, model)


@pytest.mark.parametrize(("function", "arguments"), UPSTREAM)
def test_large_float32_arrays_use_numpy_and_equal_upstream(function, arguments, monkeypatch):
    original = original_of(function)
    asked = []
    monkeypatch.setattr(mx, "eval", lambda *arrays, real=mx.eval: (asked.append(1), real(*arrays)))
    ours = ours_of(original)
    given = [8 * mx.random.normal((40, 512)) for _ in range(arguments)]
    given[-1][0, :3] = mx.array([-200.0, 200.0, 0.0])
    given[-2 if arguments > 1 else -1][0, :3] = mx.array([-200.0, 200.0, 0.0])
    found = ours(*given)
    assert asked
    assert found.dtype == mx.float32
    assert mx.allclose(found, original(*given), rtol=1e-5, atol=1e-6).item()


@pytest.mark.parametrize(("function", "arguments"), UPSTREAM)
def test_small_or_half_precision_arrays_use_the_upstream_function(function, arguments):
    original = original_of(function)
    ours = ours_of(original)
    for shape, dtype in (((4, 16), mx.float32), ((40, 512), mx.bfloat16)):
        given = [mx.random.normal(shape).astype(dtype) for _ in range(arguments)]
        assert mx.array_equal(ours(*given), original(*given)).item()


def test_numpy_attention_serves_large_vision_inputs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    attend = attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda *a, **k: (asked.append(a[0].shape[2]), attend(*a, **k))[1]
    )
    original = original_of(ensure_fused_sdpa)
    ours = ours_of(original)
    for patches in (10, 300):
        given = [mx.random.normal((1, 4, patches, 32)) for _ in range(3)]
        expected = original(*given, 0.3)
        assert mx.allclose(ours(*given, 0.3), expected, rtol=1e-4, atol=1e-5).item()
    assert asked == [300]


def test_a_function_of_the_same_name_is_left_alone() -> None:
    def swiglu(x, gate, alpha):  # another one's
        return x

    assert ours_of(swiglu) is None


def test_functions_are_replaced_once_and_restored(tmp_path: Path, installed: Install) -> None:
    model = load_text(build(tmp_path / "model", "qwen3"), LoadOptions()).model
    with Unpatched(model):
        installed(model)
        ours = qwen3.swiglu
        assert ours is not swiglu
        assert ours.original is swiglu
        installed(model)
        assert qwen3.swiglu is ours
        remove("test", REPLACEMENTS, model)
        assert qwen3.swiglu is swiglu
    installed(model)
    patched = qwen3.scaled_dot_product_attention
    with Unpatched(model):
        assert qwen3.scaled_dot_product_attention is original_of(patched)
    assert qwen3.scaled_dot_product_attention is patched


def test_separate_rows_stay_routed_below_attention(tmp_path: Path, installed: Install) -> None:
    """Whichever comes first: what is routed under a replacement stays routed."""
    folder = build(tmp_path / "model", "qwen3")
    model = load_text(folder, LoadOptions()).model
    installed(model)
    before = qwen3.scaled_dot_product_attention
    load_text(folder, LoadOptions())
    assert qwen3.scaled_dot_product_attention is before
    remove("test", REPLACEMENTS, model)
    assert qwen3.scaled_dot_product_attention.patch.__name__ == "route_attention"


def test_a_hybrid_model_gets_the_cpu_functions(tmp_path: Path, installed: Install) -> None:
    model = load_qwen3_5(build(tmp_path / "model", "qwen3_5"), LoadOptions()).model
    installed(model)
    for name in ("_precise_swiglu", "swiglu", "scaled_dot_product_attention"):
        assert getattr(language, name).patch == ("test", name)


def test_a_layer_of_mlx_calls_the_replaced_activation(installed: Install) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU(approx="tanh")

    block = Block()
    x = mx.random.normal((40, 512))
    with Unpatched(block):
        expected = block.act(x)
    installed(block)
    assert hasattr(activations.gelu_approx, "patch")
    assert mx.allclose(block.act(x), expected, rtol=1e-5, atol=1e-6).item()


def test_numpy_attention_is_chosen_for_each_separate_row_by_its_own_keys() -> None:
    """Whether NumPy is worth it is then a matter of its own keys."""
    attend = ours_of(original_of(qwen3.scaled_dot_product_attention))
    mx.random.seed(3)
    lengths = (9, 700, 40)
    pairs = [[mx.random.normal((1, 2, n, 8)) for _ in range(2)] for n in lengths]
    queries = mx.random.normal((3, 8, 1, 8))
    runs = [Run(None, slice(i, i + 1)) for i in range(3)]
    keys, values = (Parts(list(each), runs, isolated=True) for each in zip(*pairs, strict=True))
    found = attend(queries, keys, values, None, scale=0.3, mask=[None] * 3)
    alone = [
        attend(queries[i : i + 1], *pair, None, scale=0.3, mask=None)
        for i, pair in enumerate(pairs)
    ]
    applies = [attention.applies(queries[:1], [Part(*p, None)], {"scale": 0.3}) for p in pairs]
    assert applies == [False, True, False]
    assert mx.array_equal(found, mx.concatenate(alone))
