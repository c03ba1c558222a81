"""Token counts are those of the model's template and tokenizer, on every route that counts."""

import base64

import pytest
from PIL import Image

from tiny_pictures import encoded

TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]
MESSAGES_TOOLS = [
    {**{n: TOOL[n] for n in ("name", "description")}, "input_schema": TOOL["parameters"]}
]
SYSTEM = "You are kind, and you say little."
ASKED = "How is the weather in Paris today?"


IMAGE = base64.b64encode(encoded(Image.new("L", (64, 64), "grey"))).decode()
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
MESSAGES_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": IMAGE},
}
RESPONSES_IMAGE = {"type": "input_image", "image_url": CHAT_IMAGE["image_url"]["url"]}


def post(raw, path, body, **more):
    reply = raw.post(path, json={"model": "demo", **body, **more}, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("image", [False, True])
def test_the_token_count_of_messages_equals_the_usage(raw, own_engine, image):
    content = [{"type": "text", "text": ASKED}, *([MESSAGES_IMAGE] if image else [])]
    body = {"messages": [{"role": "user", "content": content}], "system": SYSTEM}
    body |= {"tools": MESSAGES_TOOLS}
    usage = post(raw, "/v1/messages", body, max_tokens=1)["usage"]
    truth = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    counted = post(raw, "/v1/messages/count_tokens", body)
    assert counted["input_tokens"] == truth
    assert counted["litellm_count_source"] == "provider"


@pytest.mark.parametrize("image", [False, True])
def test_the_token_count_of_responses_equals_the_usage(raw, own_engine, image):
    content = [{"type": "input_text", "text": ASKED}, *([RESPONSES_IMAGE] if image else [])]
    body = {"input": [{"role": "user", "content": content}], "instructions": SYSTEM}
    body |= {"tools": [{"type": "function", **TOOL}]}
    truth = post(raw, "/v1/responses", body, max_output_tokens=1)["usage"]["input_tokens"]
    assert post(raw, "/v1/responses/input_tokens", body)["input_tokens"] == truth


@pytest.mark.parametrize("image", [False, True])
def test_the_token_count_of_chat_equals_the_usage(raw, own_engine, image):
    content = [{"type": "text", "text": ASKED}, *([CHAT_IMAGE] if image else [])]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    body = {"messages": messages, "tools": CHAT_TOOLS}
    truth = post(raw, "/v1/chat/completions", body, max_tokens=1)["usage"]["prompt_tokens"]
    counted = post(raw, "/utils/token_counter", body)
    assert (counted["total_tokens"], counted["tokenizer_type"]) == (truth, "mlx")


@pytest.mark.parametrize("mark", [{}, {"prefix": True}])
def test_the_token_count_includes_the_last_assistant_message(raw, own_engine, mark):
    """A turn of its own, or the beginning of the reply."""
    said = {"role": "assistant", "content": "The capital of France is"} | mark
    body = {"messages": [{"role": "user", "content": ASKED}, said]}
    truth = post(raw, "/v1/chat/completions", body, max_tokens=1)["usage"]["prompt_tokens"]
    assert post(raw, "/utils/token_counter", body)["total_tokens"] == truth


def test_the_token_count_of_a_text_prompt_equals_the_usage(raw, own_engine):
    truth = post(raw, "/v1/completions", {"prompt": ASKED}, max_tokens=1)["usage"]["prompt_tokens"]
    assert post(raw, "/utils/token_counter", {"prompt": ASKED})["total_tokens"] == truth


def test_a_prompt_beyond_the_context_is_counted(raw, own_engine):
    body = {"messages": [{"role": "user", "content": "word " * 70_000}]}
    assert post(raw, "/v1/messages/count_tokens", body)["input_tokens"] >= 65_536


def test_a_token_count_generates_nothing(engine, raw):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": MESSAGES_TOOLS}
    reply = post(raw, "/v1/messages/count_tokens", body, model="scripted")
    assert reply["input_tokens"] == 101
    assert not engine.seen()["requests"]
    (counted,) = engine.seen()["counted"]
    assert counted["origin"] == "remote"
    assert counted["options"]["kv_bits"] == 8


@pytest.mark.parametrize(
    ("model", "content", "status", "words"),
    [
        ("scripted", "missing", 404, "no such model"),
        ("scripted", [{"type": "hologram"}], 400, "messages[0].content[0].type is 'hologram'"),
        ("anything//etc", "x", 404, "/etc"),
    ],
)
def test_a_token_count_that_fails_has_status_and_reason(engine, raw, model, content, status, words):
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    reply = raw.post("/v1/messages/count_tokens", json=body)
    assert (reply.status_code, words in reply.text) == (status, True), reply.text
    assert "Traceback" not in reply.text


def test_a_token_count_of_a_full_engine_is_a_local_estimate(engine, raw):
    body = {"messages": [{"role": "user", "content": "full"}]}
    reply = post(raw, "/v1/messages/count_tokens", body, model="scripted")
    assert reply["litellm_count_source"] == "local_estimate"
    assert 0 < reply["input_tokens"] < 100
