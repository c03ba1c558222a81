"""Bugs that were measured in the servers that this engine replaces, each as a test of this engine.

Sources: mlx-lm 0.32.2's and mlx-vlm 0.7.10's servers, November 2026.
"""

from typing import Any

import pytest

from mlx_provider.errors import BadRequest, ModelNotFound
from mlx_provider.protocol.requests import Sampling

WARM = Sampling(temperature=1.5, seed=3)


def test_an_exact_cache_hit_does_not_kill_the_engine(qwen: Any) -> None:
    """A prompt sent again with its own reply left nothing to prefill and ended mlx-lm's thread."""
    prompt = [60 + i % 90 for i in range(40)]
    first = qwen.ask(prompt=prompt, logprobs=True).only
    whole = [*prompt, *first.tokens]
    assert qwen.ask(prompt=whole).error is None
    again = qwen.ask(prompt=whole)
    assert again.error is None
    assert again.usage.cached_tokens == len(whole) - 1


def test_a_stop_string_is_found_in_any_tokenization(qwen: Any) -> None:
    """mlx-lm matches canonical token ids only: with others, the reply continued and lost text."""
    text = qwen.ask(max_tokens=30).only.content
    for start in range(1, len(text) - 3):
        stop = text[start : start + 3]
        choice = qwen.ask(max_tokens=30, stop=[stop]).only
        assert choice.content == text[: text.index(stop)]
        assert choice.reason == "stop"


def test_an_unknown_model_leaves_the_running_one_alone(qwen: Any) -> None:
    """mlx-vlm unloads its model when a request names a model that does not exist."""
    before = qwen.ask("one").only.content
    with pytest.raises(ModelNotFound):
        qwen.ask("one", model="/nowhere/at/all")
    assert qwen.model in [served.model for served in qwen.client.health().models]
    assert qwen.ask("one").only.content == before


def test_an_invalid_request_fails_by_itself(qwen: Any) -> None:
    """In mlx-vlm one bad request of a batch gave every request in flight a 500."""
    running = [qwen.start(f"question {i}", max_tokens=60) for i in range(3)]
    with pytest.raises(BadRequest):
        qwen.ask(messages=[])
    with pytest.raises(BadRequest):
        qwen.ask(prompt=[10**9])
    answers = [qwen.read(each).only.content for each in running]
    assert answers == [qwen.ask(f"question {i}", max_tokens=60).only.content for i in range(3)]


def test_a_template_that_writes_bos_gets_no_second_one(tiny: Any) -> None:
    """mlx-vlm doubles BOS for Gemma 3 and Llama."""
    model = tiny("llama")
    served = model.service.models
    prompt_tokens = model.ask("hello").prompt_tokens
    tokenizer = next(s for s in served.views() if s.name == model.model).model.tokenizer
    rendered = model.prompt_of(messages=[{"role": "user", "content": "hello"}])
    ids = tokenizer.encode(rendered, special=False)
    assert len(ids) == prompt_tokens
    assert ids.count(ids[0]) == 1
