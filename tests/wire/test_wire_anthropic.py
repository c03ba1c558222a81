"""Anthropic's routes of an engine, read by Anthropic's SDK and by LiteLLM's own provider."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from mlx_provider.protocol.events import (
    Accepted,
    Delta,
    Done,
    Finish,
    Timings,
    ToolCallDelta,
    Usage,
)
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.testing.scripted import Call, Step, script
from mlx_provider.wire.anthropic.request import chat_messages, message_request
from mlx_provider.wire.anthropic.routes import WholeResponse
from mlx_provider.wire.openai import answer as openai
from mlx_provider.wire.responses import routes as responses
from mlx_provider.wire.responses.conversation import ChatTools
from mlx_provider.wire.responses.routes import echo_of

TOOL: dict[str, Any] = {
    "name": "look",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
WORDS = "one two three"
CALLS = (Call("look", {"at": "a"}), Call("look"))
SCHEMA = {"type": "json_schema", "schema": {"const": 17}}
ONE_TOOL = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
ALL = Step("Here it is.", CALLS, think="Hm.")
CASES: dict[str, tuple[Step, dict[str, Any], list[Any], tuple[str, str | None]]] = {
    "thought, text and calls": (
        ALL,
        {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        ["Hm.", "Here it is.", {"at": "a"}, {}],
        ("tool_use", None),
    ),
    "omitted thoughts": (
        Step(WORDS, think="Hm."),
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        ["", WORDS],
        ("end_turn", None),
    ),
    "stop": (Step(WORDS), {"stop_sequences": ["x", " two"]}, ["one"], ("stop_sequence", " two")),
    "stop in a thought": (
        Step("Hello", think="The answer is near"),
        {"stop_sequences": ["answer"], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        ["The answer is near", "Hello"],
        ("end_turn", None),
    ),
    "end": (Step(WORDS), {}, [WORDS], ("end_turn", None)),
    "limit": (Step(WORDS), {"max_tokens": 2}, ["one two"], ("max_tokens", None)),
    "schema": (
        Step("17"),
        {
            "output_config": {"effort": "low", "format": SCHEMA},
            "extra_body": {"output_format": SCHEMA},
        },
        ["17"],
        ("end_turn", None),
    ),
    "chosen tool": (
        Step(calls=CALLS),
        {"tools": [TOOL, {**TOOL, "name": "other"}], "tool_choice": ONE_TOOL},
        [{"at": "a"}],
        ("tool_use", None),
    ),
}


def asked(engine: Any, step: Step, more: Mapping[str, Any]) -> Any:
    text = {"type": "text", "text": script(step), "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [text]}]
    return {"model": engine.scripted, "max_tokens": 200, "messages": messages, **more}


def said_by(message: Any) -> list[Any]:
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [getattr(block, fields[block.type]) for block in message.content]


def checked(reply: str) -> Any:
    from anthropic.types import Message

    return Message.model_validate_json(reply, strict=True)  # the client itself checks nothing


def without_ids(message: Any) -> Any:
    blocks = [
        block.model_dump(include={"type", "thinking", "signature", "text", "name", "input"})
        for block in message.content
    ]
    return blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens


@pytest.mark.parametrize("case", CASES)
def test_a_message_is_the_same_whole_and_streamed(engine: Any, claude: Any, case: str) -> None:
    step, more, said, end = CASES[case]
    fields = asked(engine, step, more)
    raw = claude.messages.with_raw_response.create(**fields)
    whole = checked(raw.text())
    assert said_by(whole) == said
    assert (whole.stop_reason, whole.stop_sequence) == end
    assert all(block.signature for block in whole.content if block.type == "thinking")
    with claude.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert without_ids(final) == without_ids(whole)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_the_asynchronous_anthropic_client_streams_the_reply(engine: Any) -> None:
    import anthropic

    async with (
        anthropic.AsyncAnthropic(
            base_url=engine.url,
            auth_token="the-key",
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
        ) as client,
        client.messages.stream(**asked(engine, Step(WORDS), {})) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == WORDS


def test_the_events_of_a_messages_stream_come_in_order(engine: Any) -> None:
    body = asked(engine, ALL, {"tools": [TOOL], "stream": True})
    answer = engine.http.post("/v1/messages?beta=true", json=body).raise_for_status()
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in answer.text.split("\n\n") if frame]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [f"event: {event['type']}" for event in events] == [name for name, _ in frames]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = list(dict.fromkeys((e.get("index"), e["type"]) for e in events))
    blocks = [(index, kind) for index in range(4) for kind in block]
    start, *between, delta, stop = kinds
    assert [start, *between] == [(None, "message_start"), *blocks]
    assert [delta, stop] == [(None, "message_delta"), (None, "message_stop")]


def test_reply_blocks_sent_back_reuse_a_prefix(engine: Any, claude: Any) -> None:
    """Blocks of a reply come back as they were, and a prefix is computed once."""
    second = Step("done")
    text = "a long beginning " * 40 + script(ALL, second)
    messages: list[Any] = [{"role": "user", "content": text}]
    fields: Any = {"model": engine.scripted, "max_tokens": 200, "tools": [TOOL]}
    first = claude.messages.create(**fields, messages=messages)
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "x"}]}
        for call in calls
    ]
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "text", "text": "go on"}, *results]},
    ]
    count = claude.messages.count_tokens(
        model=engine.scripted, messages=messages, tools=fields["tools"]
    )
    reply = claude.messages.create(**fields, messages=messages)
    assert said_by(reply) == ["done"]
    usage = reply.usage
    assert usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens + usage.input_tokens == count.input_tokens
    assert usage.input_tokens < first.usage.input_tokens / 2
    assert usage.cache_creation_input_tokens == 0, "it marks no part of the prompt"


def test_a_prompt_with_cache_control_reports_its_stored_tokens_separately(
    engine: Any, claude: Any
) -> None:
    """As for Claude Code, which marks its prompts: the three counts are the whole prompt."""
    mark = {"cache_control": {"type": "ephemeral"}}
    begin = {"type": "text", "text": "a stored beginning " * 40, **mark}
    counts = []
    for words in ("first", "second"):
        text = {"type": "text", "text": script(Step(words)), **mark}
        fields: Any = {"messages": [{"role": "user", "content": [begin, text]}]}
        fields["model"] = engine.scripted
        prompt = claude.messages.count_tokens(**fields).input_tokens
        with claude.messages.stream(**fields, max_tokens=20) as stream:
            used = stream.get_final_message().usage
        read, stored = used.cache_read_input_tokens, used.cache_creation_input_tokens
        assert read is not None
        assert stored is not None
        assert used.input_tokens + read + stored == prompt
        assert used.input_tokens == 1, "the last token is computed by every request"
        counts.append((read, stored))
    (_, stored), (read, new) = counts
    assert stored > 100
    assert read > 100 > new > 0


def test_a_tool_result_with_is_error_begins_with_error() -> None:
    text = [{"type": "text", "text": "no file"}]
    for content, shown in (
        ("no file", "Error: no file"),
        (None, "Error:"),
        (text, [{"type": "text", "text": "Error:"}, *text]),
    ):
        block = {"type": "tool_result", "tool_use_id": "a", "content": content}
        for failed, wanted in ((True, shown), (False, content)):
            turn = {"role": "user", "content": [block | {"is_error": failed}]}
            messages, _ = chat_messages(None, [turn])
            assert [each["content"] for each in messages] == [wanted]


def test_errors_and_warnings_name_the_block(engine: Any) -> None:
    """Messages of chat are others: a system prompt and each result is one."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": [image]}
    messages: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, call]},
        {"role": "user", "content": [{"type": "text", "text": "b"}, result, image]},
    ]
    body = {"model": engine.scripted, "max_tokens": 1, "system": "Be brief.", "messages": messages}
    told = engine.http.post("/v1/messages", json=body).raise_for_status().headers["x-mlx-warnings"]
    assert "messages[2].content[1].content[0]: image omitted" in told
    assert "messages[2].content[2]: image omitted" in told
    call["name"] = ""
    answer = engine.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages[1].content[1] must hold")


def test_a_prefilled_reply_is_continued(engine: Any, claude: Any) -> None:
    messages: list[Any] = [
        {"role": "user", "content": script(Step(WORDS))},
        {"role": "assistant", "content": "one"},
    ]
    counts = [
        claude.messages.count_tokens(model=engine.scripted, messages=messages[:last]).input_tokens
        for last in (1, 2)
    ]
    assert counts[1] == counts[0] + 1  # the word, without a header


@pytest.mark.parametrize(
    ("fields", "status", "kind", "named"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": True}, 400, "invalid_request_error", "max_tokens"),
        ({"temprature": 1}, 400, "invalid_request_error", "temprature"),
        ({"temperature": 3}, 400, "invalid_request_error", "temperature"),
        ({"n": 2}, 400, "invalid_request_error", "n=2"),
        ({"stop": ["x"]}, 400, "invalid_request_error", "stop="),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400,
         "invalid_request_error", "tools[0].type"),
        ({"thinking": {"type": "adaptive", "display": "some"}}, 400, "invalid_request_error",
         "thinking.display"),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error", "tool_choice.type"),
        ({"output_config": {"format": {"type": "grammar"}}}, 400, "invalid_request_error",
         "output_config.format"),
        ({"output_format": {"type": "grammar"}}, 400, "invalid_request_error", "output_format"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, 400,
         "invalid_request_error", "'document'"),
        ({"messages": [{"role": "user", "content": "ab " * 4000}]}, 400, "invalid_request_error",
         "prompt is too long: "),
        ({"origin": "owner"}, 400, "invalid_request_error", "origin"),
        ({"tenant": "other"}, 400, "invalid_request_error", "tenant"),
        ({"options": {"trust_remote_code": True}}, 400, "invalid_request_error", "options"),
        ({"model": "no/such"}, 404, "not_found_error", "no/such"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_has_anthropics_form(
    engine: Any, fields: dict[str, Any], status: int, kind: str, named: str, stream: bool
) -> None:
    body = asked(engine, Step(WORDS), {"stream": stream, **fields})
    answer = engine.http.post("/v1/messages", json=body)
    assert answer.status_code == status
    said = answer.json()
    assert said.keys() == {"type", "error", "request_id"}
    assert (said["type"], said["error"]["type"]) == ("error", kind)
    assert named in said["error"]["message"]


ACCEPTED = Accepted(id="r", model="m", prompt_tokens=1, max_tokens=5)
DONE = Done(
    usage=Usage(prompt_tokens=1, completion_tokens=5),
    timings=Timings(queued=0, prefill=0, first_token=0, total=0, tokens_per_second=0),
)


@pytest.mark.parametrize(
    ("wanted", "reason"), [(5, "max_tokens"), (6, "model_context_window_exceeded")]
)
def test_a_cut_reply_stops_with_max_tokens_or_a_full_context(wanted: int, reason: str) -> None:
    body = json.loads(
        WholeResponse(ACCEPTED, wanted).feed([ACCEPTED, Finish(reason="length"), DONE])
    )
    assert (body["stop_reason"], body["content"]) == (reason, [])


def test_a_malformed_call_is_not_repeated_as_a_partial_call() -> None:
    """As of a tagged call that names a parameter twice: a stream has sent its beginning."""
    half = ToolCallDelta(index=0, id="c", name="f", arguments='{"a": "b"')
    good = ToolCallDelta(index=1, id="d", name="g", arguments='{"a": 1}')
    text = Delta(content="<f><a>b</a><a>c</a></f>")
    events = [ACCEPTED, Delta(tool_calls=[half]), text, Delta(tool_calls=[good]), DONE]
    chat = openai.WholeResponse(ACCEPTED).body(events)["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in chat["tool_calls"]] == ['{"a": 1}']
    assert chat["content"] == text.content
    message = WholeResponse(ACCEPTED, 5).body(events)["content"]
    assert [block["type"] for block in message] == ["text", "tool_use"]
    response = responses.WholeResponse(ACCEPTED, ChatTools(), echo_of({})).body(events)["output"]
    assert [item["type"] for item in response] == ["message", "function_call"]


def test_blocks_follow_the_order_of_the_events() -> None:
    call = ToolCallDelta(index=0, id="c", name="f", arguments='{"a": ')  # cut by the limit
    deltas = [
        Delta(reasoning="a", content="b"),
        Delta(reasoning="c"),
        Delta(reasoning="d", tool_calls=[call]),
    ]
    reply = WholeResponse(ACCEPTED, 5).feed([*deltas, Finish(reason="length"), DONE])
    assert said_by(checked(reply)) == ["a", "b", "cd", {"value": '{"a": '}]


@pytest.mark.parametrize("place", ["system", "tools", "message", None])
def test_a_cache_lifetime_of_one_hour_asks_to_retain_the_prefix(place: str | None) -> None:
    def marked(at: str) -> dict[str, Any]:
        return {"cache_control": {"type": "ephemeral", "ttl": "1h" if at == place else "5m"}}

    text = {"type": "text", "text": "Hi"}
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [{**text, **marked("system")}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, **marked("tools")}],
        "messages": [
            {"role": "user", "content": [{**text, **marked("message")}]},
            {"role": "assistant", "content": "Hello"},
        ],
    }
    made, _ = message_request(body, {"model": "m", "options": ModelOptions()})
    assert made.retain == (place is not None)
