"""Log-probabilities of an echoed prompt, by family."""

from typing import Any

import pytest

from mlx_provider.errors import BadRequest


def test_a_vision_model_returns_prompt_logprobs_of_text(tiny: Any) -> None:
    asked = {"prompt": "The quick brown fox", "logprobs": True, "top_logprobs": 1, "max_tokens": 3}
    model = tiny("qwen3_vl")
    answer = model.ask(echo=True, **asked)
    plain = model.ask(**asked)
    assert answer.only.logprobs[0].logprob is None
    assert len(answer.only.logprobs) == answer.prompt_tokens + 3
    assert answer.only.tokens[-3:] == plain.only.tokens
    assert "".join(each.token for each in answer.only.logprobs[:-3]) == asked["prompt"]


def test_a_family_without_prompt_logprobs_is_refused(tiny: Any) -> None:
    with pytest.raises(BadRequest, match="family 'gemma3' does not tell how likely") as caught:
        tiny("gemma3").ask(prompt="fox", echo=True, logprobs=True)
    assert caught.value.param == "logprobs"
