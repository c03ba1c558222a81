"""Prompts longer than the prefix budget get the tokens of a cold prompt."""

from collections.abc import Callable
from typing import Any

import pytest

from integrity import check_integrity
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.engine.row_cache import profile
from mlx_provider.families.text import TextModel
from mlx_provider.records import PrefillChunk, Prompt
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from mlx_provider.upstream import mlx_lm


def talk(engine: Engine, turns: int) -> list[Request]:
    """A conversation whose prompts grow by 40 tokens."""
    asked: list[Request] = []
    tokens = [30 + i * 7 % 300 for i in range(200)]
    for turn in range(turns):
        request = new_request(tokens, max_tokens=4)
        request.prompt = Prompt(tokens, snapshot_points=(70, len(tokens)))
        run(engine, request)
        asked.append(request)
        tokens = [*tokens, *[40 + turn + i * 11 % 200 for i in range(40)]]
    return asked


@pytest.mark.parametrize(
    ("family", "bits"),
    [("qwen3", None), ("qwen3", 8), ("gemma3_text", None), ("qwen3_5_text", None)],
)
def test_tokens_are_those_of_a_cold_prompt(
    tiny: Callable[..., TextModel], family: str, bits: int | None
) -> None:
    model = tiny(family, **({} if bits is None else {"head_dim": 32}))

    def make_cache() -> list[Any]:
        fresh = model.make_cache()
        return fresh if bits is None else mlx_lm.quantise_cache(fresh, bits, 32)

    whole = PrefixCache(budget=lambda: 2**30)
    talk(new_engine(model, prefix_cache=whole, make_cache=make_cache, max_chunk=64), 1)
    limit = whole.nbytes * 2 // 3
    cache = PrefixCache(budget=lambda: limit)
    row = make_cache()
    model.prefill(PrefillChunk(Prompt([*range(64)]), 0, 64, row))
    engine = new_engine(
        model, prefix_cache=cache, make_cache=make_cache, max_chunk=64, memory=profile(row)
    )
    asked = talk(engine, 4)
    cold = talk(new_engine(model, make_cache=make_cache, max_chunk=64), 4)
    assert all(request.cached_tokens >= 64 for request in asked[1:])
    for mine, its in zip(asked, cold, strict=True):
        assert output_of(mine).tokens == output_of(its).tokens
    assert cache.nbytes <= limit
    check_integrity(cache)
