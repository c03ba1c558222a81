"""Images stay whole where passes have one size, and give the same bits from the prefix cache."""

import hashlib
from collections.abc import Callable

import pytest

from mlx_provider import LoadedModel, MediaItem
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.engine.scheduling.chunking import FixedShapes
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from stepping import submit
from tiny.models import tiny_pixels

SHAPES = FixedShapes(rows=3, tokens=32)


def request_of(model: LoadedModel, before: int, after: str) -> Request:
    pixels = tiny_pixels(1)
    media = MediaItem.of("image", pixels, hashlib.sha256(pixels.tobytes()).hexdigest())
    texts = [{"type": "text", "text": text} for text in ("look here " * before, after)]
    content = [texts[0], {"type": "image"}, texts[1]]
    prompt = model.prepare(
        [{"role": "user", "content": content}], tools=[], media=[media], variables={}
    )
    return new_request(prompt, max_tokens=6, logprobs=1)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "qwen2_vl"])
@pytest.mark.parametrize("before", [4, 12], ids=["cut", "apart"])
def test_a_prompt_with_an_image_gives_equal_bits_cold_and_cached(
    load: Callable[..., LoadedModel], family: str, before: int
) -> None:
    model = load(family)
    cold = request_of(model, before, "what is it " * 9)
    engine = new_engine(model, fixed=SHAPES, max_chunk=32)
    run(engine, cold)

    engine = new_engine(
        model, fixed=SHAPES, max_chunk=32, prefix_cache=PrefixCache(budget=lambda: 2**24)
    )
    requests = [
        request_of(model, before, "who is it"),
        new_request([30] * 50, max_tokens=30),
        request_of(model, before, "what is it " * 9),
        request_of(model, before, "what is it " * 9),
    ]
    for request in requests:
        submit(engine, request, steps=9)
    run(engine)
    expected = output_of(cold)
    for request in requests[2:]:
        assert output_of(request).tokens == expected.tokens
        assert output_of(request).logprobs == expected.logprobs
    spans = cold.prompt.spans
    assert requests[3].cached_tokens % 32 == 0
    assert all(not span.start < requests[3].cached_tokens < span.end for span in spans)
    assert requests[3].cached_tokens >= SHAPES.whole(spans[0].start)
