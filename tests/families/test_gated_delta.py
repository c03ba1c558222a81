"""The gated delta rule in chunks that fit, against upstream's token by token."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_vlm.models.qwen3_5 import gated_delta

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


def test_chunks_grow_with_the_root_of_the_tokens() -> None:
    fit_chunks()
    assert not hasattr(gated_delta.gated_delta_chunked.pristine, "pristine")
    assert [chunk_size(n) for n in (1, 64, 65, 256, 257, 1024, 10**6)] == [8, 8, 16, 16, 32, 32, 64]
