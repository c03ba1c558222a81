"""The whole way: client, proxy, engine process, shipped model."""

import os
import signal

import openai
import pytest

LONG = {"max_tokens": 30_000, "min_tokens": 20_000}
"""Text that no test awaits, whatever the model would like to say."""


def say(text):
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0}


def test_greedy_text_is_equal_on_every_route(client, raw, own_engine):
    asked = say("What is the capital of France?")
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    usage = whole.usage
    assert usage.prompt_tokens > usage.prompt_tokens_details.cached_tokens >= 0
    assert usage.completion_tokens > 1

    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    reply = raw.post("/v1/chat/completions", json=asked).raise_for_status().json()
    assert reply["choices"][0]["message"]["content"] == text
    with raw.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as events:
        assert "[DONE]" in list(events.iter_lines())[-2:][0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_a_400_also_for_a_stream(raw, own_engine, stream):
    reply = raw.post("/v1/chat/completions", json={**say("word " * 70_000), "stream": stream})
    assert reply.status_code == 400, "also for a stream: nothing was sent yet"
    assert "ContextWindowExceededError" in reply.text
    assert "Traceback" not in reply.text


def test_a_killed_engine_fails_its_stream_and_the_next_request_starts_another(client, own_engine):
    client.chat.completions.create(**say("Hello!"))
    before = own_engine.health().pid
    chunks = client.chat.completions.create(**say("Tell me a story."), stream=True, extra_body=LONG)
    next(chunks)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine"):
        list(chunks)
    reply = client.chat.completions.create(**say("What is the capital of France?"))
    assert "Paris" in reply.choices[0].message.content
    assert own_engine.health().pid != before
