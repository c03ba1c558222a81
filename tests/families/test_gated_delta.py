"""The gated delta rule in chunks that fit, against upstream's token by token."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_vlm.models.qwen3_5 import gated_delta

from mlx_provider.upstream import cpu_device, cpu_gated_delta
from mlx_provider.upstream import gated_delta as adapter
from mlx_provider.upstream.gated_delta import chunk_size, fit_chunks


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 33, 100, 300])
def test_equal_to_the_recurrence(tokens: int) -> None:
    fit_chunks()
    fit_chunks()
    mx.random.seed(tokens)
    q, k, v = (mx.random.normal((1, tokens, 2, 8)) * 8**-0.5 for _ in range(3))
    g, beta = mx.random.uniform(0.5, 1, (1, tokens, 2)), mx.random.uniform(0, 1, (1, tokens, 2))
    state = mx.random.normal((1, 2, 8, 8))
    ours = gated_delta.gated_delta_chunked(q, k, v, g, beta, state)
    theirs = gated_delta.gated_delta_ops(q, k, v, g, beta, state)
    for a, b in zip(ours, theirs, strict=True):
        assert mx.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [2, 5, 16, 17, 40])
def test_numpys_shares_keys_among_heads_and_survives_a_decay_of_nothing(
    rows: int, tokens: int
) -> None:
    q, k = (mx.random.normal((rows, tokens, 2, 8)) * 8**-0.5 for _ in range(2))
    v = mx.random.normal((rows, tokens, 4, 6))
    g, beta = (mx.random.uniform(0, 1, (rows, tokens, 4)) for _ in range(2))
    g[:, 1] = 0
    state = mx.random.normal((rows, 4, 6, 8))
    ours = cpu_gated_delta.gated_delta(q, k, v, g, beta, state)
    theirs = gated_delta.gated_delta_ops(q, k, v, g, beta, state)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert mx.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("rows", "ours"), [(1, False), (8, True)])
def test_one_token_of_many_rows_is_numpys(
    rows: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_chunks()
    asked = []
    step = cpu_gated_delta.gated_delta_step
    monkeypatch.setattr(
        adapter, "gated_delta_step", lambda *given: (asked.append(1), step(*given))[1]
    )
    q, k = (mx.random.normal((rows, 1, 4, 32)) * 32**-0.5 for _ in range(2))
    v, state = mx.random.normal((rows, 1, 8, 32)), mx.random.normal((rows, 8, 32, 32))
    g, beta = (mx.random.uniform(0, 1, (rows, 1, 8)) for _ in range(2))
    before = mx.array(state)
    found = gated_delta.gated_delta_ops(q, k, v, g, beta, state)
    theirs = gated_delta.gated_delta_ops.pristine(q, k, v, g, beta, state)
    assert bool(asked) == (ours and cpu_device.in_use())
    assert mx.array_equal(state, before).item()
    for a, b in zip(found, theirs, strict=True):
        assert a.shape == b.shape
        assert mx.allclose(a, b, atol=1e-5).item()


def test_with_a_mask_it_is_upstreams() -> None:
    fit_chunks()
    q, k, v = (mx.random.normal((1, 9, 2, 8)) * 8**-0.5 for _ in range(3))
    g, beta = (mx.random.uniform(0.5, 1, (1, 9, 2)) for _ in range(2))
    state, mask = mx.random.normal((1, 2, 8, 8)), mx.array([[False] * 2 + [True] * 7])
    _, ours = gated_delta.gated_delta_chunked(q, k, v, g, beta, state, mask)
    _, theirs = gated_delta.gated_delta_ops(q, k, v, g, beta, state, mask)
    assert mx.allclose(ours, theirs, atol=1e-5)


def test_chunks_grow_with_the_root_of_the_tokens() -> None:
    fit_chunks()
    assert not hasattr(gated_delta.gated_delta_chunked.pristine, "pristine")
    assert [chunk_size(n) for n in (1, 64, 65, 256, 257, 1024, 10**6)] == [8, 8, 16, 16, 32, 32, 64]
