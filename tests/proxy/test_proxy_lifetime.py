"""A client that leaves frees its request at once, whichever route it came by."""

from concurrent.futures import ThreadPoolExecutor

import pytest

CLIENTS = 16

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "slow"}]},
    "/v1/completions": {"prompt": "slow"},
    "/v1/messages": {"messages": [{"role": "user", "content": "slow"}], "max_tokens": 9},
    "/v1/responses": {"input": "slow"},
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_leaves_a_stream_cancels_its_request_on_every_route(engine, raw, route):
    """Many at once, so that some leave between two chunks."""
    body = {"model": "scripted", "stream": True, **ROUTES[route]}

    def leave_early(_):
        with raw.stream("POST", route, json=body) as reply:
            seen = ""
            for part in reply.iter_text():
                seen += part
                if "w3" in seen:
                    break

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(leave_early, range(CLIENTS)))
    engine.wait_for(lambda seen: len(seen["cancelled"]) == CLIENTS)
    assert not engine.seen()["finished"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_leaves_before_the_answer_cancels_its_request(engine, leave, route):
    leave(route, {"model": "scripted", **ROUTES[route]}, lambda: engine.seen()["requests"])
    engine.wait_for(lambda seen: seen["cancelled"])
    assert not engine.seen()["finished"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_beyond_the_timeout_header_is_cancelled(engine, raw, stream):
    body = {"model": "scripted", "stream": stream, **ROUTES["/v1/chat/completions"]}
    reply = raw.post("/v1/chat/completions", json=body, headers={"x-litellm-timeout": "2"})
    assert "time limit of 2 s has passed" in reply.text
    assert reply.status_code in ((200, 408) if stream else (408,))  # late where the proxy is busy
    engine.wait_for(lambda seen: seen["cancelled"])
