"""The same engine behind Anthropic's and OpenAI's newer API."""

import openai
import pytest

TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}


def say(text):
    return [{"role": "user", "content": text}]


def test_the_messages_route_answers_whole_and_streamed(engine, claude):
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


def test_messages_return_thoughts_and_tool_calls(engine, claude):
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


@pytest.mark.parametrize("stream", [False, True])
def test_messages_report_the_stop_reason_and_the_stop_sequence(engine, claude, stream):
    def ask(text, **more):
        given = {"model": "scripted", "max_tokens": 9, "messages": say(text), **more}
        if not stream:
            return claude.messages.create(**given)
        with claude.messages.stream(**given) as events:
            return events.get_final_message()

    reply = ask("one two three", stop_sequences=["two", "zero"])
    assert reply.content[-1].text == "one"
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "two")
    reply = ask("one", stop_sequences=["two"])
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert ask("weather", tools=[TOOL]).stop_reason == "tool_use"


def test_disable_parallel_tool_use_and_cache_control_reach_the_engine(engine, raw):
    body = {"model": "scripted", "max_tokens": 9, "messages": say("x"), "tools": [TOOL]}
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    mark = {"type": "ephemeral", "ttl": "1h"}
    raw.post("/v1/messages", json={**body, "tool_choice": alone}).raise_for_status()
    assert engine.request["parallel_tool_calls"] is False
    for marked in ({"cache_control": mark}, {"tools": [{**TOOL, "cache_control": mark}]}):
        raw.post("/v1/messages", json={**body, **marked}).raise_for_status()
        assert (engine.request["parallel_tool_calls"], engine.request["retain"]) == (True, True)
    wrong = {"type": "auto", "disable_parallel_tool_use": "yes"}
    reply = raw.post("/v1/messages", json={**body, "tool_choice": wrong})
    assert reply.status_code == 400
    assert "tool_choice.disable_parallel_tool_use" in reply.text


def test_the_extra_parameters_of_claude_code_are_accepted(engine, claude):
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


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"type": "integer"}}}


def test_response_schemas_reach_the_engine_unchanged_on_every_route(engine, claude, client):
    """On every route: the bridges drop some, and demand every property of others."""
    form = {"type": "json_schema", "schema": SCHEMA}
    for name, given in (
        ("output_config", {"effort": "low", "format": form}),
        ("output_format", form),
    ):
        claude.messages.create(
            model="scripted", max_tokens=9, messages=say("x"), extra_body={name: given}
        )
        assert engine.request["response_format"]["json_schema"]["schema"] == SCHEMA
    assert engine.seen()["requests"][-2]["template"]["reasoning_effort"] == "low"
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError, match="output_config"):
        claude.messages.create(
            model="scripted",
            max_tokens=9,
            messages=say("x"),
            extra_body={"output_config": {"format": {"type": "grammar"}}},
        )
    loose = {"type": "json_object", "schema": SCHEMA}
    client.chat.completions.create(model="scripted", messages=say("x"), response_format=loose)
    assert engine.request["response_format"] == loose
    for given in (loose, {**form, "name": "n"}):
        client.responses.create(model="scripted", input="x", text={"format": given})
        assert engine.request["response_format"]["json_schema"]["schema"] == SCHEMA


def test_a_token_limit_of_minus_one_is_no_limit_and_true_is_refused(engine, claude, client):
    """-1 is no limit, as for LM Studio and llama.cpp; a truth value is no number."""
    ask = client.chat.completions.create
    ask(model="scripted", messages=say("x"), max_tokens=-1)
    assert engine.request["max_tokens"] is None
    client.completions.create(model="scripted", prompt="x", max_tokens=-1)
    assert engine.request["max_tokens"] is None
    client.responses.create(model="scripted", input="x", max_output_tokens=-1)
    assert engine.request["max_tokens"] is None
    claude.messages.create(model="scripted", max_tokens=-1, messages=say("x"))
    assert engine.request["max_tokens"] is None
    for name in ("max_tokens", "max_completion_tokens", "n", "seed"):
        with pytest.raises(openai.BadRequestError, match="must be a number"):
            ask(model="scripted", messages=say("x"), extra_body={name: True})


def test_continue_final_message_continues_the_last_assistant_message(engine, client):
    history = [*say("x"), {"role": "assistant", "content": "one"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    ask = client.chat.completions.create
    ask(model="scripted", messages=history, extra_body=body)
    assert engine.request["continues"] is True
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        ask(model="scripted", messages=say("x"), extra_body=body)


def test_the_responses_route_answers_whole_and_streamed(engine, client):
    whole = client.responses.create(model="scripted", input="one two", reasoning={"effort": "low"})
    assert whole.output_text == "one two"
    assert engine.request["template"]["reasoning_effort"] == "low"
    with client.responses.stream(model="scripted", input="one two") as events:
        for _ in events:
            pass
        assert events.get_final_response().output_text == "one two"


def test_the_extra_parameters_of_codex_are_accepted(engine, client):
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
