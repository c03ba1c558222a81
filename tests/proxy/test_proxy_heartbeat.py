"""While a prompt is computed, clients get events of their own protocol, never mere comments."""

import time

import pytest

SILENCE = 2
"""Seconds for which the script `silent` says nothing."""


def said(text):
    return [{"role": "user", "content": text}]


def timed(events):
    """Each event, with the seconds after which it came."""
    began = time.monotonic()
    return [(time.monotonic() - began, event) for event in events]


def test_chat_has_empty_deltas(engine, client):
    stream = client.chat.completions.create(
        model="scripted",
        messages=said("silent"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = timed(stream)
    early = [chunk for seconds, chunk in chunks if seconds < SILENCE - 0.5]
    assert len(early) >= 3
    assert not any(chunk.choices[0].delta.content for chunk in early)
    assert early[0].choices[0].delta.role == "assistant"
    every = [chunk for _, chunk in chunks]
    assert len({(chunk.id, chunk.created) for chunk in every}) == 1
    assert "".join(c.choices[0].delta.content or "" for c in every if c.choices) == "silent"
    assert every[-1].usage.prompt_tokens == 7


def test_responses_are_in_progress(engine, client):
    events = timed(client.responses.create(model="scripted", input="silent", stream=True))
    kinds = [event.type for _, event in events]
    early = [event.type for seconds, event in events if seconds < SILENCE - 0.2]
    assert early[0] == "response.created"
    assert early.count("response.in_progress") >= 2
    assert kinds.count("response.created") == 1
    assert kinds[-1] == "response.completed"
    told = {event.response.id for _, event in events if hasattr(event, "response")}
    assert len(told) == 1
    assert events[-1][1].response.output_text == "silent"


def test_the_client_s_own_accumulator_follows(engine, client):
    with client.responses.stream(model="scripted", input="silent") as stream:
        assert stream.get_final_response().output_text == "silent"


def test_messages_have_pings(engine, claude, raw):
    body = {"model": "scripted", "max_tokens": 9, "messages": said("silent"), "stream": True}
    with raw.stream("POST", "/v1/messages", json=body) as reply:
        lines = timed(reply.iter_lines())
    early = [line for seconds, line in lines if seconds < SILENCE - 0.2]
    assert early.count("event: ping") >= 2
    assert early.count('data: {"type": "ping"}') >= 2
    with claude.messages.stream(model="scripted", max_tokens=9, messages=said("silent")) as stream:
        assert stream.get_final_text() == "silent"


def test_a_quick_answer_has_none(engine, client):
    chunks = list(
        client.chat.completions.create(model="scripted", messages=said("quick"), stream=True)
    )
    assert chunks[0].choices[0].delta.content == "quick"
    kinds = [e.type for e in client.responses.create(model="scripted", input="quick", stream=True)]
    assert kinds.count("response.created") == kinds.count("response.in_progress") == 1


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_whoever_leaves_in_silence_ends_the_request(engine, raw, path):
    body = {"model": "scripted", "stream": True, "max_tokens": 99}
    body |= {"input": "slow"} if path == "responses" else {"messages": said("silent slow")}
    if path == "responses":
        body["input"] = "silent slow"
        del body["max_tokens"]
    with raw.stream("POST", f"/v1/{path}", json=body) as reply:
        next(reply.iter_lines())
    engine.wait_for(lambda seen: len(seen["cancelled"]) == 1)
