"""Parameters without effect are named in a header of every route, streamed or not, or refused."""

import pytest

HEADER = "llm_provider-x-mlx-warnings"
CHAT = {"messages": [{"role": "user", "content": "x"}]}
ROUTES = {
    "/v1/chat/completions": {**CHAT, "store": True},
    "/v1/responses": {"input": "x", "tools": [{"type": "web_search"}]},
    "/v1/messages": {**CHAT, "max_tokens": 9, "service_tier": "standard_only"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_parameters_without_effect_are_named_in_the_warnings_header(engine, raw, path, stream):
    body = {"model": "scripted", "stream": stream, **ROUTES[path]}
    with raw.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, reply.read()
        assert "has no effect" in reply.headers[HEADER]
        reply.read()


def test_server_side_tools_are_left_out_and_named_in_the_warnings_header(engine, raw):
    """Only what a client can run is shown to the model."""
    kinds = ("mcp", "code_interpreter", "web_search_preview", "local_shell", "new")
    own = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    tools = [{"type": kind, "server_label": "s"} for kind in kinds]
    tools += [{"type": "file_search", "vector_store_ids": []}, own]  # LiteLLM takes it out itself
    reply = raw.post("/v1/responses", json={"model": "scripted", "input": "x", "tools": tools})
    assert reply.status_code == 200, reply.text
    assert [tool["function"]["name"] for tool in engine.request["tools"]] == ["f"]
    assert all(f"({kind})" in reply.headers[HEADER] for kind in kinds)
    raw.post("/v1/responses", json={"model": "scripted", "input": "x", "tools": tools[:1]})
    assert engine.request["tools"] == []


@pytest.mark.parametrize("path", ROUTES)
def test_unknown_fields_of_a_tool_are_removed(engine, raw, path):
    """The model does not see them."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"name": "f", "input_schema": schema}
    if path == "/v1/chat/completions":
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "title": "F"}}
    if path == "/v1/responses":
        tool = {"type": "function", "name": "f", "parameters": schema}
    tool |= {"defer_loading": True, "cache_control": {"type": "ephemeral"}}
    more = {"input": "x"} if path == "/v1/responses" else {**CHAT, "max_tokens": 9}
    reply = raw.post(path, json={"model": "scripted", **more, "tools": [tool, tool | {"x": 1}]})
    if path == "/v1/responses":  # two tools of one name
        assert reply.status_code == 400
        reply = raw.post(path, json={"model": "scripted", **more, "tools": [tool | {"x": 1}]})
    assert reply.status_code == 200, reply.text
    (function, *_) = (tool["function"] for tool in engine.request["tools"])
    assert function["name"] == "f"
    assert function["parameters"] == schema
    assert not {"title", "defer_loading", "x"} & function.keys()


def test_a_request_without_ineffective_parameters_has_no_warnings_header(engine, raw):
    reply = raw.post("/v1/chat/completions", json={"model": "scripted", **CHAT})
    assert HEADER not in reply.headers


def test_verbosity_is_named_without_effect_if_the_template_ignores_it(raw, own_engine):
    body = {"model": "demo", **CHAT, "max_tokens": 2, "verbosity": "low"}
    reply = raw.post("/v1/chat/completions", json=body)
    assert "verbosity has no effect" in reply.headers[HEADER]
