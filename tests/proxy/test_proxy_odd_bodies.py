"""Bodies that no honest client sends, at a real proxy: refused, and nobody is led astray."""

import json

import pytest

from .conftest import refused

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "x"}]


def body(**more):
    return {"model": "scripted", "messages": HI, **more}


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


REFUSED = [
    (body(stop=["x" * 100_000]), "stop.0: at most 1024 characters are possible, got 100000"),
    (body(messages=HI * 11_000), "messages: at most 10000 entries"),
    (body(response_format={"type": "json_schema", "x": nested(300)}), "nested deeper than 100"),
    (body(timeout="soon"), "timeout must be a number of seconds, got 'soon'"),
    (body(allowed_openai_params=5), "allowed_openai_params must be a list of texts, got 5"),
    (body(additional_drop_params=5), "additional_drop_params must be a list of texts, got 5"),
    (body(api_key="my-own"), "api_key cannot be sent"),
    (body(messages=None), "messages"),
    (body(model=None), "model"),
]


@pytest.mark.parametrize(("sent", "words"), REFUSED)
def test_an_odd_body_is_refused_with_a_short_400(engine, raw, sent, words):
    reply = raw.post(URL, json=sent)
    refused(reply, words)
    assert len(reply.text) < 2000
    assert engine.seen()["requests"] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "NaN"), ("temperature", "Infinity"), ("logit_bias", '{"5": NaN}')],
)
def test_a_parameter_that_is_no_finite_number_is_refused(engine, raw, field, value):
    content = f'{{"model": "scripted", "messages": {json.dumps(HI)}, "{field}": {value}}}'
    reply = raw.post(URL, content=content, headers={"content-type": "application/json"})
    assert (reply.status_code, "finite number" in reply.text) == (400, True)


@pytest.mark.parametrize(
    "more",
    [
        {"api_base": "http://127.0.0.1:9"},
        {"base_url": "http://127.0.0.1:9"},
        {"extra_body": {"api_base": "http://127.0.0.1:9"}},
        {"litellm_params": {"api_base": "http://127.0.0.1:9", "api_key": "k"}},
        {"extra_body": {"api_key": "k"}},
        {"optional_params": {"api_base": "http://127.0.0.1:9"}},
        {"fallbacks": [{"model": "scripted", "api_base": "http://127.0.0.1:9"}], "model": "absent"},
    ],
)
def test_a_client_cannot_direct_a_request_to_another_address(engine, raw, more):
    """LiteLLM itself refuses an address, with a 500; what it lets through we refuse by name."""
    reply = raw.post(URL, json=body(**more))
    assert reply.status_code in (400, 500)
    assert "Traceback" not in reply.text
    assert engine.seen()["requests"] == []


def test_a_key_in_a_fallback_is_refused_too(engine, raw):
    fallbacks = [{"model": "scripted", "api_key": "my-own"}]
    reply = raw.post(URL, json=body(model="absent", fallbacks=fallbacks))
    assert reply.status_code >= 400
    assert engine.seen()["requests"] == []


def test_a_client_cannot_set_options_or_tenant_by_metadata(engine, raw):
    plain = raw.post(URL, json=body())
    first = engine.request
    claimed = {
        "metadata": {"user_api_key_hash": "another", "user_api_key_team_id": "theirs"},
        "model_info": {"mlx": {"kv_bits": 4, "allow_media": ["file"]}},
    }
    posing = raw.post(URL, json=body(**claimed))
    assert (plain.status_code, posing.status_code) == (200, 200)
    for name in ("options", "salt", "tenant", "model"):
        assert engine.request[name] == first[name]


def test_the_proxy_serves_a_request_after_all_odd_bodies(engine, raw):
    reply = raw.post(URL, json=body(messages=[{"role": "user", "content": "still\0here é😀"}]))
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "still\0here é😀"
