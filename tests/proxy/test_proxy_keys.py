"""Requests without the proxy's key, to a proxy without a database."""

import httpx
import openai
import pytest

from mlx_provider.gateway.proxy import Proxy

TEXT = [{"role": "user", "content": "Hi"}]
ROUTES = {
    "/v1/chat/completions": {"messages": TEXT},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": TEXT, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": TEXT},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/models": None,
}
KEYS = {
    "none": {},
    "empty": {"authorization": ""},
    "bare": {"authorization": "Bearer"},
    "wrong": {"authorization": "Bearer sk-wrong"},
    "no sk": {"authorization": "Bearer hello"},
    "x-api-key": {"x-api-key": "sk-wrong"},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("key", KEYS)
def test_a_missing_or_wrong_key_is_401_with_the_reason(proxy: Proxy, route: str, key: str) -> None:
    logged = len(proxy.log.read_text())
    body = ROUTES[route]
    reply = httpx.request(
        "GET" if body is None else "POST",
        proxy.url + route,
        json=body and {"model": "scripted", **body},
        headers=KEYS[key],
        trust_env=False,
        timeout=60,
    )
    assert reply.status_code == 401, reply.text
    message = reply.json()["error"]["message"]
    assert message.startswith(
        "Wrong key" if "sk-wrong" in str(KEYS[key]) or key == "no sk" else "No key"
    )
    assert "mlx-provider up" in message
    assert "sk-wrong" not in message
    told = proxy.log.read_text()[logged:]  # of earlier requests, too
    assert "Traceback" not in told
    assert "sk-wrong" not in told


def test_sdk_clients_raise_an_authentication_error_for_a_wrong_key(proxy: Proxy) -> None:
    import anthropic

    plain = {"api_key": "sk-wrong", "max_retries": 0}
    client = openai.OpenAI(base_url=f"{proxy.url}/v1", **plain)
    with pytest.raises(openai.AuthenticationError, match="Wrong key"):
        client.chat.completions.create(model="scripted", messages=TEXT)
    claude = anthropic.Anthropic(base_url=proxy.url, **plain)
    with pytest.raises(anthropic.AuthenticationError, match="Wrong key"):
        claude.messages.create(model="scripted", messages=TEXT, max_tokens=5)


def test_a_parameter_that_clients_may_not_set_is_a_bad_request(raw: httpx.Client) -> None:
    body = {"model": "scripted", "messages": TEXT, "api_base": "http://127.0.0.1:1"}
    reply = raw.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "api_base" in reply.json()["error"]["message"]
