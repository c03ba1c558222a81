"""While a prompt is computed, clients get events of their own protocol, never mere comments."""

from itertools import takewhile

import pytest


def said(text):
    return [{"role": "user", "content": text}]


def test_a_silent_chat_stream_sends_empty_deltas(engine, client):
    reply = client.chat.completions.create(
        model="scripted",
        messages=said("silent"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = engine.heard(reply, lambda chunk: chunk.choices and not chunk.choices[0].delta.content)
    signs = list(takewhile(lambda chunk: not chunk.choices[0].delta.content, chunks))
    assert len(signs) >= 3
    assert signs[0].choices[0].delta.role == "assistant"
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "silent"
    assert chunks[-1].usage.prompt_tokens == 7


def test_a_silent_responses_stream_sends_in_progress_events(engine, client):
    reply = client.responses.create(model="scripted", input="silent", stream=True)
    events = engine.heard(reply, lambda event: event.type == "response.in_progress")
    kinds = [event.type for event in events]
    signs = list(takewhile(lambda kind: kind != "response.output_item.added", kinds))
    assert signs[0] == "response.created"
    assert set(signs[1:]) == {"response.in_progress"}
    assert len(signs) >= 3
    assert kinds.count("response.created") == 1
    assert kinds[-1] == "response.completed"
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert events[-1].response.output_text == "silent"


def test_a_silent_messages_stream_sends_pings(engine, claude, raw):
    body = {"model": "scripted", "max_tokens": 9, "messages": said("silent"), "stream": True}
    with raw.stream("POST", "/v1/messages", json=body) as reply:
        lines = engine.heard(reply.iter_lines(), lambda line: line == "event: ping")
    signs = list(takewhile(lambda line: line != "event: content_block_delta", lines))
    assert signs.count("event: ping") >= 2
    assert signs.count('data: {"type": "ping"}') >= 2
    with claude.messages.stream(model="scripted", max_tokens=9, messages=said("pause")) as stream:
        assert stream.get_final_text() == "pause"


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_client_that_leaves_a_silent_stream_cancels_its_request(engine, raw, path):
    asked = {"messages": said("silent slow"), "max_tokens": 99}
    body = {"input": "silent slow"} if path == "responses" else asked
    body |= {"model": "scripted", "stream": True}
    with raw.stream("POST", f"/v1/{path}", json=body) as reply:
        next(reply.iter_lines())
    engine.wait_for(lambda seen: len(seen["cancelled"]) == 1)
