"""What OpenAI's own models are sent by LiteLLM is sent to ours, blocking or not."""

import litellm
import pytest

from mlx_provider.bounds import MAX_NAME

HI = [{"role": "user", "content": "hi"}]

OPENAI = {
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "logprobs": True,
    "top_logprobs": 2,
    "max_completion_tokens": 9,
    "metadata": {"session_id": "thread"},
    "modalities": ["text"],
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "safety_identifier": "somebody",
    "seed": 3,
    "service_tier": "flex",
    "stop": ["a", "b"],
    "store": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "top_p": 0.5,
    "user": "me",
    "verbosity": "low",
    "web_search_options": {},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_openai_parameter_reaches_the_engine(engine, stream):
    asked = {"model": "mlx/m", "messages": HI, "stream": stream, **OPENAI}
    litellm.completion(**asked)
    await litellm.acompletion(**asked)
    template = {"reasoning_effort": "low", "enable_thinking": True, "verbosity": "low"}
    assert len(engine.requests) == 2
    for request in engine.requests:
        assert (request.max_tokens, request.n, request.session) == (9, 2, "thread")
        assert (request.template, request.sampling.seed) == (template, 3)
        assert set(request.ignored) == {"prediction", "service_tier", "store", "web_search_options"}


@pytest.mark.parametrize(
    ("given", "session"),
    [
        ({"user": "me"}, "me"),
        ({"safety_identifier": "hash"}, "hash"),
        ({"user": "me", "metadata": {"session_id": "s1"}}, "s1"),
        ({"user": "me", "prompt_cache_key": "key"}, "key"),
        ({"user": "x" * 5000}, "x" * MAX_NAME),
        ({}, None),
    ],
)
def test_user_and_cache_key_parameters_become_the_session(engine, given, session):
    litellm.completion(model="mlx/m", messages=HI, **given)
    assert engine.request.session == session


def test_the_older_thinking_parameter_sets_the_thinking_budget(engine):
    litellm.completion(
        model="mlx/m", messages=HI, thinking={"type": "enabled", "budget_tokens": 77}
    )
    assert engine.request.thinking_budget == 77


def test_unsupported_parameters_of_other_providers_are_still_refused():
    with pytest.raises(litellm.UnsupportedParamsError):
        litellm.completion(model="ollama/llama2", messages=HI, verbosity="low")
