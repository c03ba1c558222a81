"""Qwen3.5's rows of several lengths in one cache are not copied out row by row."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models.qwen3_5 import language

from mlx_provider import LoadedModel, LoadOptions, PrefillChunk, Prompt
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from mlx_provider.upstream import attention
from mlx_provider.upstream.batch_caches import merge_rows
from mlx_provider.upstream.patching import patch
from mlx_provider_qwen3_5 import load
from mlx_provider_qwen3_5.patches import KERNEL, PADDED, mask_padding
from tiny import build
from tolerances import logprob_tolerance


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of keys and values that were indexed by row, which upstream does."""
    found: list[tuple[int, ...]] = []

    def take(array: mx.array, *args: Any, real: Callable[..., mx.array] = mx.take, **more: Any):
        if array.ndim == 4:
            found.append(array.shape)
        return real(array, *args, **more)

    monkeypatch.setattr(mx, "take", take)
    return found


def padded(lengths: list[int], size: int) -> tuple[list[mx.array], dict[str, Any]]:
    """Queries, keys and values of rows that end together, and the other arguments of attention."""
    longest = max(lengths)
    queries = mx.random.normal((len(lengths), 8, size, 32))
    keys, values = (mx.random.normal((len(lengths), 4, longest, 32)) for _ in range(2))
    paddings = [longest - length for length in lengths]
    cache = SimpleNamespace(_qwen3_5_decode_left_padding=paddings)
    return [queries, keys, values], {"cache": cache, "scale": 0.3, "mask": None}


@pytest.fixture
def functions() -> tuple[Callable[..., mx.array], Callable[..., mx.array]]:
    """Our function and upstream's; the module calls ours, as after every load."""
    patch([language], attention.NAME, attention.route_attention)
    original = getattr(language, PADDED)
    while hasattr(original, "original"):
        original = original.original
    return mask_padding(original), original


def test_rows_of_several_lengths_need_one_call_of_attention(functions, gathers) -> None:
    ours, original = functions
    for lengths in ([9, 6, 2], [200, 197, 1]):
        given, more = padded(lengths, 1)
        expected = original(*given, **more)
        assert gathers
        gathers.clear()
        assert mx.allclose(ours(*given, **more), expected, rtol=1e-4, atol=1e-5).item()
        assert not gathers


def test_attention_of_several_tokens_a_row_equals_upstream(functions) -> None:
    ours, original = functions
    given, more = padded([9, 6], 2)
    assert mx.array_equal(ours(*given, **more), original(*given, **more)).item()


def test_a_kernel_of_upstream_has_precedence(functions, monkeypatch) -> None:
    ours, _ = functions
    monkeypatch.setattr(language, KERNEL, lambda queries, *rest: queries + 1)
    given, more = padded([9, 6], 1)
    assert mx.array_equal(ours(*given, **more), given[0] + 1).item()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("padded") / "qwen3_5"
    return load(build(folder, "qwen3_5", dtype=request.param), LoadOptions())


@pytest.mark.parametrize("layout", ["grouped", "merged"])
def test_an_engine_never_gathers(model: LoadedModel, layout: str, gathers: list[Any]) -> None:
    """With rows in a shared cache, and rows with separate caches."""
    engine = new_engine(model, layout=layout, max_chunk=512)
    requests = [new_request([20 + n] * n, max_tokens=6) for n in (3, 40, 90, 700)]
    run(engine, *requests)
    assert [len(output_of(request).tokens) for request in requests] == [6] * 4
    assert not gathers


def test_a_batch_of_different_rows_decodes_as_each_alone(model: LoadedModel, gathers) -> None:
    caches, alone = [], []
    lengths = (3, 40, 90)
    for length in lengths:
        prompt = Prompt([20 + length] * length)
        both = [model.make_cache() for _ in range(2)]
        for cache in both:
            model.prefill(PrefillChunk(prompt, 0, length, cache))
        caches.append(both[0])
        alone.append(model.decode(mx.array([30]), both[1], mx.array([length]))[0])
    batch = merge_rows(caches)
    assert batch[-1].left_padding.tolist() == [87, 50, 0]
    found = model.decode(mx.array([30] * 3), batch, mx.array(lengths))
    assert mx.max(mx.abs(found - mx.stack(alone))).item() <= logprob_tolerance(model.info.precision)
    assert not gathers
