"""What takes the place of mlx-vlm's functions where there is no Metal, against upstream's."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models.qwen3_5 import gated_delta

from mlx_provider_qwen3_5 import patches
from mlx_provider_qwen3_5.patches import take_smaller_chunks, use_small_chunks
from tolerances import logprob_tolerance


def upstreams(function: Any) -> Any:
    """Another test's model may have had it replaced."""
    while hasattr(function, "original"):
        function = function.original
    return function


CHUNKED = upstreams(gated_delta.gated_delta_chunked)
RECURRENCE = upstreams(gated_delta.gated_delta_ops)


@pytest.mark.parametrize(
    ("tokens", "hidden"), [*((n, 0) for n in (1, 2, 7, 8, 9, 33, 100, 300)), (9, 2)]
)
def test_the_chunked_gated_delta_equals_the_recurrence(tokens: int, hidden: int) -> None:
    mx.random.seed(tokens)
    q, k, v = (mx.random.normal((1, tokens, 2, 8)) * 8**-0.5 for _ in range(3))
    g, beta = mx.random.uniform(0.5, 1, (1, tokens, 2)), mx.random.uniform(0, 1, (1, tokens, 2))
    state, mask = mx.random.normal((1, 2, 8, 8)), mx.arange(tokens)[None] >= hidden
    given = (q, k, v, g, beta, state, *([mask] if hidden else []))
    pairs = zip(use_small_chunks(CHUNKED)(*given), RECURRENCE(*given), strict=True)
    equal = [mx.allclose(ours, theirs, atol=logprob_tolerance()) for ours, theirs in pairs]
    assert all(equal[bool(hidden) :]), "what a hidden token reads is nobody's"


@pytest.mark.parametrize("metal", [False, True])
def test_gated_delta_is_replaced_off_metal(metal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(gated_delta, patches.CHUNKED, CHUNKED)
    take_smaller_chunks()
    first = gated_delta.gated_delta_chunked
    take_smaller_chunks()
    assert gated_delta.gated_delta_chunked is first
    assert (first is CHUNKED) == metal
