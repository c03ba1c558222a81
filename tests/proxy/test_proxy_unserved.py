"""Endpoints that mlx models do not serve, and tools that no model can call."""

import pytest

from .conftest import refused

M = {"model": "scripted"}
JSON = {
    "/v1/images/generations": {**M, "prompt": "x"},
    "/v1/rerank": {**M, "query": "x", "documents": ["a"]},
    "/v1/audio/speech": {**M, "input": "x", "voice": "alloy"},
    "/v1/moderations": {**M, "input": "x"},
    "/v1/videos": {**M, "prompt": "x"},
    "/v1beta/models/scripted:generateContent": {"contents": [{"parts": [{"text": "x"}]}]},
}
FORMS = {
    "/v1/images/edits": {"image": ("a.png", b"x", "image/png")},
    "/v1/audio/transcriptions": {"file": ("a.wav", b"x", "audio/wav")},
}


@pytest.mark.parametrize("path", [*JSON, *FORMS])
def test_an_unserved_endpoint_is_refused_and_chat_stays_in_service(engine, raw, client, path):
    if path in JSON:
        reply = raw.post(path, json=JSON[path])
    else:
        reply = raw.post(path, data={**M, "prompt": "x"}, files=FORMS[path])
    refused(reply, "is not served by mlx models, which answer chat completions")
    chat = client.chat.completions.create(**M, messages=[{"role": "user", "content": "fine"}])
    assert chat.choices[0].message.content == "fine", "the chat model must not be taken out"
    assert len(engine.seen()["requests"]) == 1


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({}, "tools[0].function must be an object with a name"),
        ({"type": "web_search"}, "tools[0].type is 'web_search'"),
        ({"type": "function"}, "tools[0].function must be an object with a name"),
        ({"type": "function", "function": {"name": ""}}, "tools[0].function.name must be a text"),
        ({"type": "function", "name": "flat", "parameters": {}}, "tools[0].function must be"),
        ({"type": "custom", "custom": {"name": "x"}}, "tools[0].type is 'custom': only tools of"),
    ],
)
def test_an_invalid_tool_is_refused_by_its_place(engine, raw, tool, words):
    body = {**M, "messages": [{"role": "user", "content": "x"}]}
    refused(raw.post("/v1/chat/completions", json={**body, "tools": [tool]}), words)
    if "function" in tool:  # this route takes the form of the Responses API, too
        refused(raw.post("/utils/token_counter", json={**body, "tools": [tool]}), words)
    assert not engine.seen()["requests"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("web_search_20250305", "no server runs it here"),
        ("code_execution_20250825", "no server runs it here"),
        ("bash_20250124", "only Anthropic's models know its schema"),
        ("text_editor_20250728", "only Anthropic's models know its schema"),
        ("computer_20250124", "only Anthropic's models know its schema"),
    ],
)
def test_a_server_or_model_tool_of_anthropic_is_refused_with_the_reason(engine, raw, kind, reason):
    body = {**M, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    tools = [{"type": kind, "name": "it"}]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = raw.post(path, json={**body, "tools": tools})
        refused(reply, f"tools[0].type is '{kind}': {reason}")
    assert not engine.seen()["requests"]
