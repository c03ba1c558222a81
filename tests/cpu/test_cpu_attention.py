"""Our attention on the CPU against MLX's own."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import ThreadpoolController

from mlx_provider.records import Part, Parts, Run
from mlx_provider.upstream.attention import route_attention
from mlx_provider_cpu import attention as cpu_attention
from mlx_provider_cpu.functions import _attention


def inputs(
    L: int, S: int, heads: int = 4, shared: int = 2, seed: int = 0, rows: int = 1, width: int = 8
) -> list[mx.array]:
    rng = np.random.default_rng(seed)
    several = heads // shared
    shapes = (rows, heads, L, width), (rows, several, S, width), (rows, several, S, 6)
    return [mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes]


def difference(arrays: list[mx.array], mask: mx.array | str | None) -> float:
    expected = mx.fast.scaled_dot_product_attention(*arrays, scale=0.5, mask=mask)
    queries, keys, values = arrays
    found = cpu_attention.attend(queries, [Part(keys, values, mask)], scale=0.5)
    assert found.shape == expected.shape
    return float(mx.abs(found - expected).max().item())  # type: ignore[arg-type]


@given(
    L=st.integers(1, 40),
    before=st.integers(0, 60),
    shared=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["none", "causal", "window", "added", "per head", "per row"]),
    rows=st.sampled_from([1, 3]),
    width=st.sampled_from([8, 80]),
    block=st.sampled_from([64, 1000, 10**6]),
    cores=st.integers(1, 5),
)
def test_cpu_attention_equals_mlx_for_every_mask_block_size_and_core_count(
    L: int, before: int, shared: int, kind: str, rows: int, width: int, block: int, cores: int
) -> None:
    S = L + before
    at, to = mx.arange(before, S)[:, None], mx.arange(S)[None]
    window = (at >= to) & (at < to + 5)
    masks = {
        "none": None,
        "causal": "causal",
        "window": window,
        "added": mx.where(window, 0.25, -1e9),
        "per head": mx.stack([window, at >= to, at >= to, window])[None],
        "per row": mx.stack([to >= row for row in range(rows)])[:, None],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "BLOCK", block)
        patch.setattr(cpu_attention, "QUERIES", 1)
        patch.setattr(cpu_attention, "PARALLEL_SCORES", 0)
        patch.setattr(cpu_attention, "core_count", lambda: cores)
        arrays = inputs(L, S, shared=shared, rows=rows, width=width)
        assert difference(arrays, masks[kind]) < 2e-5


def test_a_fully_masked_row_attends_to_the_mean_like_mlx() -> None:
    mask = mx.array([[False] * 4, [True] * 4])
    assert difference(inputs(2, 4), mask) < 1e-5


def test_a_large_masked_key_does_not_change_attention() -> None:
    queries, keys, values = inputs(2, 3)
    keys[:, :, -1] *= 1e4
    assert difference([queries, keys, values], "causal") < 1e-4


def test_caches_of_one_call_are_attended_together() -> None:
    asked: list[tuple[int, ...]] = []

    def original(queries: mx.array, *rest: object, **named: object) -> mx.array:
        asked.append(queries.shape)
        return mx.zeros((*queries.shape[:3], 6))

    attend = _attention(route_attention(original))
    rows, chunk = inputs(1, 50), inputs(12, 500, seed=1)
    few = mx.arange(50)[None] < 40
    queries = mx.concatenate([rows[0], chunk[0].swapaxes(0, 2)])
    runs = [Run("rows", slice(0, 1)), Run("chunk", slice(1, 13), turned=True)]
    keys, values = (Parts([rows[i], chunk[i]], runs) for i in (1, 2))
    found = attend(queries, keys, values, None, scale=0.5, mask=[few, "causal"])
    assert not asked  # the rows alone would not be worth it
    sdpa = mx.fast.scaled_dot_product_attention
    expected = [sdpa(*rows, scale=0.5, mask=few), sdpa(*chunk, scale=0.5, mask="causal")]
    together = mx.concatenate([expected[0], expected[1].swapaxes(0, 2)])
    assert float(mx.abs(found - together).max()) < 1e-5
    attend(queries, keys, values, None, scale=0.5, mask=[few, "causal"], sinks=mx.zeros(4))
    assert asked == [(1, 4, 1, 8), (1, 4, 12, 8)]


def test_cpu_attention_replaces_mlx_only_for_long_float32_inputs_without_sinks() -> None:
    def original(*args: object, **kwargs: object) -> str:
        return "original"

    attend = _attention(route_attention(original))
    long, one, short = inputs(100, 100), inputs(1, 2000), inputs(20, 20)
    assert attend(*long, None, scale=1.0, mask="causal").shape == (1, 4, 100, 6)
    assert attend(*long, None, 1.0, "causal").shape == (1, 4, 100, 6)
    assert attend(*one, None, scale=1.0, mask=None).shape == (1, 4, 1, 6)
    queries, keys, values = (mx.concatenate([array, array]) for array in one)
    runs = [Run(None, slice(0, 1)), Run(None, slice(1, 2))]
    parts = [Parts([a[:1], a[1:]], runs) for a in (keys, values)]
    together = attend(queries, *parts, None, scale=1.0, mask=None)
    assert float(mx.abs(together - attend(*one, None, scale=1.0, mask=None)).max()) == 0
    queries, keys, values = long
    parts = [Parts([array], [Run(None, slice(0, 100), turned=True)]) for array in (keys, values)]
    riding = attend(queries.swapaxes(0, 2), *parts, None, scale=1.0, mask=["causal"])
    alone = attend(*long, None, scale=1.0, mask="causal")
    assert float(mx.abs(riding.swapaxes(0, 2) - alone).max()) == 0
    half = [array.astype(mx.bfloat16) for array in long]
    sinks = mx.zeros(4)
    for arrays, options in ((short, {}), (half, {}), (long, {"sinks": sinks})):
        assert attend(*arrays, None, scale=1.0, mask=None, **options) == "original"


def test_numpy_leaves_the_other_cores_to_mlx() -> None:
    queries, keys, values = inputs(2, 3)
    threads = ThreadpoolController()
    paths = [one["filepath"] for one in threads.info() if "numpy.libs" in one["filepath"]]
    threads.select(filepath=paths).limit(limits=2)  # as they begin outside of the tests
    cpu_attention.limit_numpy_threads.cache_clear()
    cpu_attention.attend(queries, [Part(keys, values, None)], scale=1.0)
    wheel = [one for one in threads.info() if one["filepath"] in paths]
    assert all(one["num_threads"] == 1 for one in wheel)
