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
def test_they_are_named(engine, raw, path, stream):
    body = {"model": "scripted", "stream": stream, **ROUTES[path]}
    with raw.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, reply.read()
        assert "has no effect" in reply.headers[HEADER]
        reply.read()


def test_a_request_that_is_honoured_whole_names_none(engine, raw):
    reply = raw.post("/v1/chat/completions", json={"model": "scripted", **CHAT})
    assert HEADER not in reply.headers


def test_an_operator_may_refuse_them(engine, raw):
    body = {"model": "strict", **ROUTES["/v1/chat/completions"]}
    reply = raw.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "store: has no effect here" in reply.text
    fine = raw.post("/v1/chat/completions", json={"model": "strict", **CHAT})
    assert fine.status_code == 200


def test_a_template_that_reads_no_effort(raw, own_engine):
    body = {"model": "demo", **CHAT, "max_tokens": 2, "verbosity": "low"}
    reply = raw.post("/v1/chat/completions", json=body)
    assert "verbosity has no effect" in reply.headers[HEADER]
