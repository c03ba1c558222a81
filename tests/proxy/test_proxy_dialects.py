"""The same engine behind Anthropic's and OpenAI's newer API."""

import anthropic
import pytest

TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def claude(proxy):
    with anthropic.Anthropic(
        base_url=proxy.url,
        api_key=proxy.key,
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(trust_env=False),
    ) as made:
        yield made


def say(text):
    return [{"role": "user", "content": text}]


def test_messages(engine, claude):
    whole = claude.messages.create(model="scripted", max_tokens=9, messages=say("one two"))
    assert whole.content[-1].text == "one two"
    assert whole.usage.cache_read_input_tokens == 5
    assert whole.usage.input_tokens == 2
    with claude.messages.stream(
        model="scripted", max_tokens=9, messages=say("one two"), stop_sequences=list("vwxyz")
    ) as events:
        assert events.get_final_message().content[-1].text == "one two"
    assert engine.request["stop"] == list("vwxyz")
    assert engine.request["max_tokens"] == 9


def test_messages_with_tools_and_thoughts(engine, claude):
    with claude.messages.stream(
        model="scripted",
        max_tokens=2000,
        messages=say("weather"),
        tools=[TOOL],
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as events:
        reply = events.get_final_message()
    kinds = {block.type: block for block in reply.content}
    assert kinds["tool_use"].input == {"city": "Paris"}
    assert kinds["thinking"].thinking == "hm"
    assert reply.stop_reason == "tool_use"
    assert engine.request["template"]["enable_thinking"] is True


def test_claude_codes_extras_are_no_error(engine, claude):
    claude.beta.messages.create(
        model="scripted",
        max_tokens=9,
        messages=say("x"),
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "user_a_account__session_0a1b2c3d-0000-4000-8000-000000000000"},
        thinking={"type": "adaptive"},
        extra_body={
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        },
    )
    assert engine.request["messages"][0]["role"] == "system"
    assert engine.request["session"]


def test_responses(engine, client):
    whole = client.responses.create(model="scripted", input="one two", reasoning={"effort": "low"})
    assert whole.output_text == "one two"
    assert engine.request["template"]["reasoning_effort"] == "low"
    with client.responses.stream(model="scripted", input="one two") as events:
        for _ in events:
            pass
        assert events.get_final_response().output_text == "one two"


def test_codex_extras_are_no_error(engine, client):
    client.responses.create(
        model="scripted",
        instructions="be brief",
        input=[{"role": "developer", "content": "rules"}, {"role": "user", "content": "x"}],
        tools=[
            {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
            {"type": "web_search"},
        ],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="key-1",
        text={"verbosity": "low"},  # LiteLLM drops it on this route
    )
    seen = engine.request
    assert seen["session"] == "key-1"
    assert seen["parallel_tool_calls"] is False
    assert [tool["function"]["name"] for tool in seen["tools"]] == ["f"]
