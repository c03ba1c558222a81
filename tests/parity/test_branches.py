"""Prompts that branch inside a message reuse their common part exactly, in every kind of cache."""

from collections.abc import Callable
from typing import Any

import pytest

from integrity import check_integrity
from mlx_provider import MediaItem
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.families.text import TextModel
from mlx_provider.families.tokenizer.hf_tokenizer import common_length
from mlx_provider.testing.driver import new_engine, new_request, run
from references import assert_near_alone

SAMPLED = ("qwen3", "gemma3_text", "qwen3_5_text", "rwkv7")
"""One of each kind of cache; the sweep has the others."""
FAMILIES = [
    *SAMPLED,
    *(pytest.param(each, marks=pytest.mark.sweep) for each in ("llama", "gpt_oss", "nemotron_h")),
]
WORDS = "north river stone seven lamp under glass every morning table".split()
QUESTIONS = ("Which is the first?", "How many are there?", "Name the last one.", "Why seven?")


def document(words: int) -> str:
    return " ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(words))


def ask(engine: Engine, content: Any, media: list[MediaItem] | None = None) -> Request:
    messages = [{"role": "user", "content": content}]
    prompt = engine.model.prepare(messages, tools=[], media=media or [], variables={})
    request = new_request(prompt, max_tokens=6, logprobs=1)
    run(engine, request)
    return request


def reused(request: Request) -> float:
    return request.cached_tokens / len(request.prompt.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_questions_on_a_document_reuse_it(tiny: Callable[..., TextModel], family: str) -> None:
    """The second prompt resumes at a guess, the third at the branch of the first two."""
    model = tiny(family)
    prefix_cache = PrefixCache(budget=lambda: 2**26)
    engine = new_engine(model, prefix_cache=prefix_cache, max_chunk=256)
    text = document(150)
    first, second, third = (ask(engine, f"{text}\n{each}") for each in QUESTIONS[:3])
    assert first.cached_tokens == 0
    assert reused(second) >= 0.85
    assert reused(third) >= 0.9
    assert_near_alone(model, first, second, third)
    check_integrity(prefix_cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_third_prompt_resumes_at_the_branch(tiny: Callable[..., TextModel], family: str) -> None:
    """In the middle of a message, far from any guess: the third prompt resumes there."""
    model = tiny(family)
    prefix_cache = PrefixCache(budget=lambda: 2**26)
    engine = new_engine(model, prefix_cache=prefix_cache, max_chunk=96)
    text = document(60)
    asked = [ask(engine, f"{text}\n{each} " + each[::-1] * 12) for each in QUESTIONS[:3]]
    shared = common_length(asked[1].prompt.tokens, asked[2].prompt.tokens)
    assert shared < 0.7 * len(asked[2].prompt.tokens)
    assert shared - 64 < asked[2].cached_tokens <= shared
    assert_near_alone(model, *asked)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_other_questions_about_an_image_and_text_reuse_their_prefix(
    family: str, seeing: Callable[[str], tuple[Any, MediaItem]]
) -> None:
    model, item = seeing(family)
    engine = new_engine(model, prefix_cache=PrefixCache(budget=lambda: 2**26), max_chunk=256)
    text = document(150)
    asked = [
        ask(engine, [{"type": "image"}, {"type": "text", "text": f"{text}\n{each}"}], [item])
        for each in QUESTIONS[:3]
    ]
    assert reused(asked[1]) >= 0.85
    assert reused(asked[2]) >= 0.9
    assert_near_alone(model, *asked)
