"""NumPy's gated delta rule against upstream's, token by token."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models.qwen3_5.gated_delta import gated_delta_ops

from mlx_provider_cpu import gated_delta
from mlx_provider_cpu.functions import _delta_chunks


def upstreams() -> Any:
    """Another test's model may have had it replaced."""
    function: Any = gated_delta_ops
    while hasattr(function, "original"):
        function = function.original
    return function


def given(rows: int, tokens: int, keys: int = 2, heads: int = 4, size: int = 8) -> list[mx.array]:
    """q, k, v, g, beta and state."""
    q, k = (mx.random.normal((rows, tokens, keys, size)) * size**-0.5 for _ in range(2))
    v, state = mx.random.normal((rows, tokens, heads, 6)), mx.random.normal((rows, heads, 6, size))
    g, beta = (mx.random.uniform(0, 1, (rows, tokens, heads)) for _ in range(2))
    return [q, k, v, g, beta, state]


def compare(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert mx.allclose(a, b, atol=1e-5).item()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [2, 5, 16, 17, 40])
def test_keys_are_shared_among_heads_and_a_decay_of_nothing_is_survived(
    rows: int, tokens: int
) -> None:
    arrays = given(rows, tokens)
    arrays[3][:, 1] = 0
    compare(gated_delta.gated_delta(*arrays), upstreams()(*arrays))


def test_masked_and_half_precision_calls_are_upstreams() -> None:
    def original(*arrays: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        return len(arrays), more

    arrays = given(1, 5)
    mask = mx.array([[False] * 2 + [True] * 3])
    assert _delta_chunks(original)(*arrays, mask, C=16) == (7, {"C": 16})
    halves = [array.astype(mx.bfloat16) for array in arrays]
    assert _delta_chunks(original)(*halves) == (7, {})
