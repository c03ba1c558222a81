"""Attention of many queries over a quantised cache: fused, and equal within rounding."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention as upstream
from mlx_lm.models.cache import QuantizedKVCache

from kernel_count import nodes
from mlx_provider.records import Parts, Run
from mlx_provider.upstream import attention
from noted_calls import note_calls

HEADS, SHARED, WIDTH, BEFORE = 4, 2, 64, 40


def cached(bits: int, tokens: int, dtype: Any, seed: int) -> tuple[QuantizedKVCache, Any, Any]:
    """A cache with `tokens` tokens, with its keys and values."""
    rng = np.random.default_rng(seed)
    shape = (1, HEADS // SHARED, tokens, WIDTH)
    keys, values = (mx.array(rng.normal(size=shape)).astype(dtype) for _ in range(2))
    cache = QuantizedKVCache(group_size=32, bits=bits)
    return cache, *cache.update_and_fetch(keys, values)


def queries(rows: int, count: int, dtype: Any) -> mx.array:
    drawn = np.random.default_rng(9).normal(size=(rows, HEADS, count, WIDTH))
    return mx.array(drawn).astype(dtype)


def largest(difference: mx.array) -> float:
    return float(mx.abs(difference).max().item())  # type: ignore[arg-type]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of queries of each call of the fused attention, as if there were Metal."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    return note_calls(
        monkeypatch, mx.fast, "scaled_dot_product_attention", lambda x, *_, **more: x.shape[2]
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("mask", [None, "causal", "window", "added"])
def test_many_queries_equal_few_queries(
    bits: int, dtype: Any, mask: str | None, fused: list[int]
) -> None:
    """Upstream rounds scores to the dtype; the fused attention keeps them in float32."""
    count = 3 * attention.MOST_QUANTISED_QUERIES
    cache, keys, values = cached(bits, BEFORE + count, dtype, 1)
    at, to = mx.arange(BEFORE, BEFORE + count)[:, None], mx.arange(BEFORE + count)[None]
    window = (at >= to) & (at < to + 20)
    masks = {"window": window, "added": mx.where(window, 0.0, -1e4).astype(dtype)}
    given = masks.get(mask, mask) if mask is not None else None
    asking = queries(1, count, dtype)
    theirs = upstream(asking + 0, keys, values, cache, scale=0.2, mask=given)
    assert not fused
    ours = attention.route_attention(upstream)(asking, keys, values, cache, scale=0.2, mask=given)
    assert fused == [count]
    assert ours.dtype == dtype
    whole = [mx.dequantize(*each, 32, bits).astype(mx.float32) for each in (keys, values)]
    exact = upstream(asking.astype(mx.float32), *whole, None, scale=0.2, mask=given)
    assert largest(ours - exact) <= max(1e-5, largest(theirs - exact))


def test_copies_of_long_caches_exist_for_one_layer_at_a_time(fused: list[int]) -> None:
    """Earlier layers are computed first, so that their copies are freed."""
    for tokens in (attention.MOST_COPIED_LENGTH, attention.MOST_COPIED_LENGTH + 1):
        cache, keys, values = cached(8, tokens, mx.float32, 1)
        asking = queries(1, 2 * attention.MOST_QUANTISED_QUERIES, mx.float32) + 1
        attention.route_attention(upstream)(asking, keys, values, cache, scale=0.2, mask=None)
        assert bool(nodes(asking)) == (tokens <= attention.MOST_COPIED_LENGTH)
    assert len(fused) == 2


def test_heads_without_a_fused_kernel_stay_quantised(fused: list[int]) -> None:
    cache = QuantizedKVCache(group_size=32, bits=8)
    keys, values = cache.update_and_fetch(*(mx.ones((1, 1, 32, 256)) for _ in range(2)))
    attention.route_attention(upstream)(
        mx.ones((1, 1, 32, 256)), keys, values, cache, scale=0.2, mask="causal"
    )
    assert not fused


def test_a_chunk_beside_rows_that_decode_is_fused_alone(fused: list[int]) -> None:
    """Rows use the same path as alone."""
    row, chunk = cached(8, BEFORE, mx.float32, 1), cached(8, BEFORE, mx.float32, 2)
    asking = queries(1 + 2 * attention.MOST_QUANTISED_QUERIES, 1, mx.float32)
    runs = [Run(row[0], slice(0, 1)), Run(chunk[0], slice(1, None), turned=True)]
    keys, values = Parts([row[1], chunk[1]], runs), Parts([row[2], chunk[2]], runs)
    call = attention.route_attention(upstream)
    found = call(asking, keys, values, None, scale=0.2, mask=[None, "causal"])
    assert fused == [2 * attention.MOST_QUANTISED_QUERIES]
    alone = call(asking[:1] + 0, *row[1:], row[0], scale=0.2, mask=None)
    assert mx.array_equal(found[:1], alone)
