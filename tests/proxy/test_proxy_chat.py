"""Chat through a real proxy: what OpenAI's client and plain HTTP see."""

import json

import pytest

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


def say(text):
    return [{"role": "user", "content": text}]


def streamed(client, **more):
    return list(client.chat.completions.create(model="scripted", stream=True, **more))


def text(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_stream_and_non_stream_agree(proxy, engine, client, raw):
    whole = client.chat.completions.create(model="scripted", messages=say("one two three"))
    assert whole.choices[0].message.content == "one two three"
    chunks = streamed(client, messages=say("one two three"))
    assert text(chunks) == "one two three"
    assert len({(c.id, c.created) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"

    body = {"model": "scripted", "messages": say("one two three")}
    reply = raw.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert reply["choices"][0]["message"]["content"] == "one two three"
    with raw.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as events:
        lines = [line.removeprefix("data: ") for line in events.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == "one two three"


def test_chat_usage_is_reported_by_the_engine(engine, client):
    whole = client.chat.completions.create(model="scripted", messages=say("one two three"))
    chunks = streamed(client, messages=say("one two three"), stream_options={"include_usage": True})
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)
        assert usage.prompt_tokens_details.cached_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_arrives_whole_and_streamed_through_the_proxy(engine, client, stream):
    with client.chat.completions.stream(
        model="scripted", messages=say("weather"), tools=TOOLS
    ) as events:
        for _ in events:
            pass
        reply = events.get_final_completion()
    if not stream:
        reply = client.chat.completions.create(
            model="scripted", messages=say("weather"), tools=TOOLS
        )
    call = reply.choices[0].message.tool_calls[0]
    assert (call.id, call.function.name) == ("call_1", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert reply.choices[0].finish_reason == "tool_calls"
    assert engine.request["tools"] == TOOLS


def test_operator_options_reach_the_engine_and_a_client_cannot_set_them(engine, client):
    client.chat.completions.create(
        model="scripted",
        messages=say("x"),
        extra_body={"model_info": {"mlx": {"trust_remote_code": True, "cache_salt": None}}},
    )
    options = engine.request["options"]
    assert options["kv_bits"] == 8
    assert options["trust_remote_code"] is False
    assert engine.request["salt"].startswith("key:")
    assert len(engine.request["salt"]) > len("key:")


def test_extra_parameters_and_the_session_header_reach_the_engine(engine, client):
    client.chat.completions.create(
        model="scripted",
        messages=say("x"),
        stop=list("abcdef"),
        reasoning_effort="low",
        user="somebody",
        extra_body={"top_k": 3, "min_p": 0.1, "chat_template_kwargs": {"a": 1}},
        extra_headers={"x-litellm-session-id": "session-1"},
    )
    seen = engine.request
    assert seen["stop"] == list("abcdef")
    assert seen["template"] == {"a": 1, "reasoning_effort": "low", "enable_thinking": True}
    assert (seen["sampling"]["top_k"], seen["sampling"]["min_p"]) == (3, 0.1)
    assert seen["session"] == "session-1"


def test_warnings_and_rate_are_headers(engine, raw):
    body = {"model": "scripted", "messages": say("x"), "store": True}
    reply = raw.post("/v1/chat/completions", json=body).raise_for_status()
    assert reply.headers["llm_provider-x-mlx-warnings"] == "store has no effect"
    assert reply.headers["llm_provider-x-mlx-tokens-per-second"] == "50.0"


def test_aliases_of_one_model_list_separate_contexts(client, raw):
    for alias in ("demo", "brief"):
        say_hi = [{"role": "user", "content": "Hi"}]
        client.chat.completions.create(model=alias, messages=say_hi, max_tokens=1)
    listed = {each["id"]: each for each in raw.get("/v1/models").json()["data"]}
    assert (listed["demo"]["max_input_tokens"], listed["brief"]["max_input_tokens"]) == (
        65_536,
        1000,
    )


def test_the_proxy_lists_the_context_after_an_engine_has_reported_it(engine, client, raw):
    client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x"}])
    listed = {each["id"]: each for each in raw.get("/v1/models").json()["data"]}
    assert listed["scripted"]["max_input_tokens"] == 2048
    assert listed["demo"]["max_input_tokens"] == 65_536
    info = {each["model_name"]: each for each in raw.get("/model/info").json()["data"]}
    assert info["scripted"]["model_info"]["max_input_tokens"] == 2048


def test_the_proxy_lists_context_and_abilities_before_any_request(raw):
    """From the config and the folder; no engine has said a word of it."""
    listed = {each["id"]: each for each in raw.get("/v1/models").json()["data"]}
    assert listed["unasked"]["max_input_tokens"] == 900
    info = {
        each["model_name"]: each["model_info"] for each in raw.get("/model/info").json()["data"]
    }
    assert info["unasked"]["max_input_tokens"] == 900
    assert info["unasked"]["supports_function_calling"]
    assert info["unasked"]["supports_response_schema"]
    assert info["demo"]["supports_vision"]
    assert info["demo"]["output_cost_per_token"] == 0
    assert info["absent"]["supports_function_calling"]


def test_the_proxy_logs_no_warning_about_prices(proxy, client):
    client.chat.completions.create(model="scripted", messages=say("one"))
    assert "pricing" not in (proxy.log.read_text() or "pricing: the log is empty")
