"""What a client of the proxy is told when something is wrong; never a traceback."""

import json

import openai
import pytest

from sdk_clients import openai_client

from .conftest import refused

URL = "/v1/chat/completions"


def body(text="x", **more):
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **more}


REFUSED = [
    (body(model="nothing"), 400, "nothing"),
    (body("missing"), 404, "no such model; in the local cache: none"),
    (body("toolong"), 400, "prompt is too long: 9000 tokens > 2048 maximum"),
    (body("large"), 413, "this engine takes 134217728"),
    (body("full"), 429, "256 requests wait"),
    (body("bug"), 500, "internal error"),
    (body("broken"), 422, "plugin toy (toy 1.0): Toy.load failed: KeyError: 'x'"),
    (body(messages=[]), 400, "messages must be a list of at least one message"),
    (body(messages="hello"), 400, "messages must be a list, got str"),
    (body(messages=[{"role": "user"}, "y"]), 400, "messages.1 must be an object, got str"),
    (body(messages=[{"content": "x"}]), 400, "messages.0.role must be a text"),
    (body(messages=[{"role": "user", "content": 5}]), 400, "messages.0.content must be a text"),
    (body(messages=[{"role": "user", "content": ["x"]}]), 400, "messages.0.content.0 must be"),
    (
        body(messages=[{"role": "user", "content": [{"type": "input_image"}]}]),
        400,
        "messages.0.content.0: unknown type 'input_image'",
    ),
    (body(tools=["f"]), 400, ""),  # in LiteLLM's own words, which change
    (body(tools="f"), 400, ""),
    (body(tool_choice=5), 400, "tool_choice"),
    (body(response_format="json"), 400, "response_format"),
    (body(stop=5), 400, "stop"),
    (body(reasoning_effort=5), 400, "reasoning_effort"),
    (body(thinking="yes"), 400, "thinking"),
    (body(temperature=-1), 400, "temperature: must be at least 0 and at most 2, got -1"),
    (body(tempratur=1), 400, "unknown parameter: tempratur"),
    (body(trust_remote_code=True), 400, "unknown parameter: trust_remote_code"),
    (body(chat_template_kwargs={"chat_template": "x"}), 400, "cannot set chat_template"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("sent", "status", "words"), REFUSED)
def test_a_refused_request_has_status_and_reason(engine, raw, sent, status, words, stream):
    reply = raw.post(URL, json={**sent, "stream": stream})
    refused(reply, words, status)


def test_a_missing_model_leaves_the_deployment_in_service(engine, raw):
    for _ in range(2):
        assert raw.post(URL, json=body("missing")).status_code == 404
    assert raw.post(URL, json=body("fine")).status_code == 200


def test_a_busy_engine_answers_503_with_retry_after(engine, raw):
    for stream in (False, True):
        reply = raw.post(URL, json=body("busy", stream=stream, num_retries=0))
        refused(reply, "other models are in use", 503)
        assert reply.headers["retry-after"] == "3"
    assert raw.post(URL, json=body("fine")).status_code == 200


def test_a_fault_of_a_plugin_is_not_retried(engine, proxy):
    """Neither SDK nor the router, which does not take the deployment out either."""
    before = len(engine.seen()["requests"])
    with openai_client(proxy.url, proxy.key, max_retries=2) as client:
        ask = client.chat.completions.create
        for text in ("broken", "broken"):
            with pytest.raises(openai.UnprocessableEntityError, match="plugin toy") as told:
                ask(model="scripted", messages=[{"role": "user", "content": text}])
            assert told.value.response.headers["x-should-retry"] == "false"
        ask(model="scripted", messages=[{"role": "user", "content": "fine"}])
    assert len(engine.seen()["requests"]) == before + 3


def test_a_failure_in_mid_stream_is_an_error_event_without_traceback(engine, raw):
    with raw.stream("POST", URL, json=body("fail", stream=True)) as reply:
        lines = [line for line in reply.iter_lines() if line and line != "data: [DONE]"]
    assert "scripted failure" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    assert not any("Traceback" in line for line in lines)
    assert raw.post(URL, json=body("fine")).status_code == 200
