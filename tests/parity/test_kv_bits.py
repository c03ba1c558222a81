"""Every kind of prompt with a KV cache of every precision: in a batch and cached as alone.

Each case: text, one image, two images, text after an image, a second turn; all at once with rows
that decode, then all again from the prefix cache.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from equipped import equipped, load_by_family
from mlx_provider import LoadedModel, MediaItem
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.serving.probe import probe
from mlx_provider.testing.driver import (
    Alternating,
    TokenOutput,
    new_engine,
    new_request,
    output_of,
    run,
)
from mlx_provider.upstream import mlx_lm
from tiny import build, family_named
from tiny.models import tiny_image
from tolerances import logprob_tolerance

WIDE_ROPE = {"rope_scaling": {"mrope_section": [8, 4, 4], "rope_type": "default", "type": "mrope"}}
WIDE: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"head_dim": 32} | WIDE_ROPE,
    "qwen2_vl": {"num_attention_heads": 2, "num_key_value_heads": 1} | WIDE_ROPE,
    "gemma4_text": {"head_dim": 32},
    "qwen2_5_vl": {"num_attention_heads": 2, "num_key_value_heads": 1} | WIDE_ROPE,
}
"""Heads of 32: what one scale of the smallest group serves."""
CASES = [
    ("gemma3", 4), ("qwen3_vl", 8), ("qwen3_5", 4), ("qwen2_vl", 4), ("qwen2_5_vl", None),
    ("gemma4_text", 4), ("qwen3_5_text", 8),
    *(pytest.param(*case, marks=pytest.mark.sweep)
      for case in (("gemma3_text", 4), ("gemma3", None), ("gemma3", 8))),
]  # fmt: skip
LONG = "The quick brown fox asks the lazy dog what the weather is like. " * 2
ONE, OTHER = tiny_image(1), tiny_image(3, 128, 96)

Parts = tuple[str | MediaItem, ...]
TURNS: tuple[tuple[Parts, ...], ...] = (
    (("Hello there",),),
    ((LONG,), ("A fox.",), ("And the dog?",)),
    ((LONG, ONE),),
    ((ONE, "and", OTHER, LONG),),
    ((ONE, LONG), ("A circle.",), (OTHER, "And this?")),
)
"""Conversations: what user and assistant say in turn."""
Load = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @cache
    def get(name: str) -> LoadedModel:
        overrides = WIDE.get(name, {"head_dim": 32})
        folder = build(tmp_path_factory.mktemp("wide") / name, name, **overrides)
        return equipped(load_by_family(folder))

    return get


def conversation(turns: Sequence[Parts]) -> tuple[list[dict[str, Any]], list[MediaItem]]:
    media = [part for turn in turns for part in turn if isinstance(part, MediaItem)]
    messages = []
    for index, turn in enumerate(turns):
        parts = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in turn
        ]
        texts = [part for part in turn if isinstance(part, str)]
        content: Any = "".join(texts) if len(texts) == len(turn) else parts
        messages.append({"role": ("user", "assistant")[index % 2], "content": content})
    return messages, media


def requests_for(model: LoadedModel, sees: bool) -> list[Request]:
    found = []
    for turns in TURNS:
        messages, media = conversation(turns)
        if media and not sees:
            continue
        prompt = model.prepare(messages, tools=[], media=media, variables={})
        request = new_request(prompt, max_tokens=4, logprobs=1)
        found.append(request)
    return found


def assert_same(got: TokenOutput, want: TokenOutput, bits: int | None) -> None:
    """Equal tokens; in few bits, only up to a choice between two nearly equal probabilities."""
    assert len(got.tokens) == len(want.tokens) == 4
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert abs(mine.logprob - theirs.logprob) <= logprob_tolerance(bits=bits)
        if bits is not None and mine.id != theirs.id:
            return
        assert mine.id == theirs.id


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_kv_bits_keep_the_tokens_of_each_alone(name: str, bits: int | None, wide: Load) -> None:
    model, sees = wide(name), family_named(name).vision

    def make_cache() -> list[Any]:
        fresh = model.make_cache()
        return fresh if bits is None else mlx_lm.quantise_cache(fresh, bits, 32)

    found = probe(model, make_cache, model.kv_layouts)
    assert (found.layout, found.notes) == ("grouped", ())
    wanted: list[TokenOutput] = []
    for request in requests_for(model, sees):
        engine = new_engine(model, layout="solo", max_chunk=4096, make_cache=make_cache)
        run(engine, request)
        wanted.append(output_of(request))
    engine = new_engine(
        model, layout="grouped", mixes=found.mixes, scheduler=Alternating, max_chunk=12,
        make_cache=make_cache, prefix_cache=PrefixCache(budget=lambda: 2**24),
    )  # fmt: skip
    for again in (False, True):
        requests = requests_for(model, sees)
        for request in requests:
            engine.submit(request)
            engine.step()
        run(engine)
        for request, want in zip(requests, wanted, strict=True):
            assert_same(output_of(request), want, bits)
        reused = sum(request.cached_tokens for request in requests)
        assert not again or reused > sum(len(r.prompt.tokens) for r in requests) // 3
