"""A full context, as each kind of client looks for it: agents then write less and go on."""

import json

import openai
import pytest

WORDS = "prompt is too long: 9000 tokens > 2048 maximum"
CODE = "context_length_exceeded"
STREAMED = pytest.mark.parametrize("stream", [False, True])


def said(text):
    return [{"role": "user", "content": text}]


def refused(call):
    """The error body of a call that is refused with status 400."""
    with pytest.raises(openai.BadRequestError, match=WORDS) as caught:
        call()
    assert caught.value.code == CODE
    assert caught.value.type == "invalid_request_error"
    return caught.value.body


@STREAMED
def test_a_full_context_of_chat_has_the_error_of_openai(engine, client, stream):
    create = client.chat.completions.create
    body = refused(lambda: create(model="scripted", messages=said("toolong"), stream=stream))
    assert body["param"] == "messages"


def test_a_full_context_of_a_response_has_the_error_of_openai(engine, client):
    refused(lambda: client.responses.create(model="scripted", input="toolong"))


def test_a_full_context_of_a_streamed_response_has_the_code_that_codex_reads(engine, client, raw):
    """Of an error of status 400 Codex reads no code, and its session ends."""
    *_, last = client.responses.create(model="scripted", input="toolong", stream=True)
    assert last.type == "response.failed"
    assert last.response.error.code == CODE
    assert WORDS in last.response.error.message
    body = {"model": "scripted", "input": "toolong", "stream": True}
    with raw.stream("POST", "/v1/responses", json=body) as reply:
        assert reply.status_code == 200
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    assert json.loads(lines[-1][6:])["response"]["error"]["code"] == CODE
    assert not any("Traceback" in line for line in lines)


@STREAMED
def test_a_full_context_of_messages_has_the_error_of_anthropic(engine, claude, stream):
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError, match=WORDS) as caught:
        claude.messages.create(
            model="scripted", max_tokens=9, messages=said("toolong"), stream=stream
        )
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_other_refusals_of_streamed_responses_keep_their_status(engine, client):
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="scripted", input="full", stream=True)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.responses.create(model="scripted", input="x", temperature=-1, stream=True)
    assert client.responses.create(model="scripted", input="fine").output_text == "fine"
