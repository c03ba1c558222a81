"""What takes the place of mlx-vlm's functions where there is no Metal, against upstream's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models.qwen3_5 import gated_delta, language

from mlx_provider.upstream import attention
from mlx_provider.upstream.patching import patch
from mlx_provider_qwen3_5 import without_metal
from mlx_provider_qwen3_5.without_metal import fitted, masked, patch_mlx_vlm


def upstreams(function: Any) -> Any:
    """Another test's model may have had it replaced."""
    while hasattr(function, "original"):
        function = function.original
    return function


CHUNKED = upstreams(gated_delta.gated_delta_chunked)
RECURRENCE = upstreams(gated_delta.gated_delta_ops)
PADDED = upstreams(language._qwen3_5_left_padded_attention)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 33, 100, 300])
def test_equal_to_the_recurrence(tokens: int) -> None:
    mx.random.seed(tokens)
    q, k, v = (mx.random.normal((1, tokens, 2, 8)) * 8**-0.5 for _ in range(3))
    g, beta = mx.random.uniform(0.5, 1, (1, tokens, 2)), mx.random.uniform(0, 1, (1, tokens, 2))
    state = mx.random.normal((1, 2, 8, 8))
    ours = fitted(CHUNKED)(q, k, v, g, beta, state)
    theirs = RECURRENCE(q, k, v, g, beta, state)
    for a, b in zip(ours, theirs, strict=True):
        assert mx.allclose(a, b, atol=1e-5)


def test_with_a_mask_too() -> None:
    q, k, v = (mx.random.normal((1, 9, 2, 8)) * 8**-0.5 for _ in range(3))
    g, beta = (mx.random.uniform(0.5, 1, (1, 9, 2)) for _ in range(2))
    state, mask = mx.random.normal((1, 2, 8, 8)), mx.array([[False] * 2 + [True] * 7])
    _, ours = fitted(CHUNKED)(q, k, v, g, beta, state, mask)
    _, theirs = RECURRENCE(q, k, v, g, beta, state, mask)
    assert mx.allclose(ours, theirs, atol=1e-5)


def test_rows_of_several_lengths_are_attended_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    patch([language], attention.NAME, attention.routed)  # as every model that is loaded
    cache = SimpleNamespace(_qwen3_5_decode_left_padding=[0, 3, 7])
    for length in (9, 200):
        queries = mx.random.normal((3, 8, 1, 32))
        keys, values = (mx.random.normal((3, 4, length, 32)) for _ in range(2))
        given = {"cache": cache, "scale": 0.3, "mask": None}
        expected = PADDED(queries, keys, values, **given)
        with monkeypatch.context() as changed:
            changed.delattr(mx, "take")  # upstream's way to a row
            found = masked(PADDED)(queries, keys, values, **given)
        assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5).item()


def test_several_tokens_a_row_are_attended_as_upstream_does() -> None:
    queries = mx.random.normal((2, 4, 2, 32))
    keys, values = (mx.random.normal((2, 4, 9, 32)) for _ in range(2))
    cache = SimpleNamespace(_qwen3_5_decode_left_padding=[0, 3])
    given = {"cache": cache, "scale": 0.3, "mask": None}
    expected = PADDED(queries, keys, values, **given)
    assert mx.array_equal(masked(PADDED)(queries, keys, values, **given), expected).item()


@pytest.mark.parametrize("metal", [False, True])
def test_only_without_metal(metal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(gated_delta, without_metal.CHUNKED, CHUNKED)
    monkeypatch.setattr(language, without_metal.PADDED, PADDED)
    patch_mlx_vlm()
    first = gated_delta.gated_delta_chunked
    patch_mlx_vlm()
    assert gated_delta.gated_delta_chunked is first
    assert (first is CHUNKED) == metal
    assert (language._qwen3_5_left_padded_attention is PADDED) == metal
