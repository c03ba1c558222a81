"""The Responses API of an engine, read by OpenAI's SDK."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from mlx_provider.bounds import MAX_VALUES
from mlx_provider.errors import EngineUnavailable
from mlx_provider.protocol.events import Accepted, Delta, Failed, Finish, TokenLogprob
from mlx_provider.testing.scripted import Call, Step, script
from mlx_provider.wire.responses.conversation import ChatTools
from mlx_provider.wire.responses.routes import Stream, echo_of

CODEX = Path(__file__).parents[1] / "data" / "requests" / "02_responses_codex_developer.json"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
LOOK: Any = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
BILLING = "x-anthropic-billing-header: a\n"
PATCH: Any = {"type": "custom", "name": "patch", "description": "Change files."}
SPACE: Any = {"type": "namespace", "name": "agents", "description": "Helpers", "tools": [LOOK]}
TEXT = 'first "line"\nsecond'
ALL = script(
    Step(
        "Here it is.",
        (
            Call("look", {"at": "a"}),
            Call("agents__look", {"at": "b"}),
            Call("patch", {"content": TEXT}),
        ),
        think="Hm.",
    )
)
EVERY: dict[str, Any] = {"input": ALL, "tools": [LOOK, SPACE, PATCH]}


def events(text: str) -> list[Any]:
    """The events of a stream, each as the SDK's own type."""
    *frames, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    found = []
    for number, frame in enumerate(each for each in frames if not each.startswith(":")):
        name, data = frame.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"
        assert event.sequence_number == number
        found.append(event)
    return found


def said(response: Any) -> list[Any]:
    """The items of a response without their ids."""
    items = [item.model_dump(exclude_none=True) for item in response.output]
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def ask(engine: Any, **more: Any) -> Any:
    body = {"model": engine.scripted, "temperature": 0, **more}
    return engine.http.post("/v1/responses", json=body)


def test_thoughts_text_and_calls_are_equal_whole_and_streamed(engine: Any) -> None:
    whole = Response.model_validate_json(ask(engine, **EVERY).raise_for_status().text)
    assert whole.status == "completed"
    assert whole.completed_at >= whole.created_at
    assert (whole.temperature, whole.top_p) == (0, 0.95)  # the model's own, since none was asked
    assert said(whole) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [{"type": "summary_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Here it is.", "annotations": [], "logprobs": []}
            ],
        },
        {
            "type": "function_call",
            "name": "look",
            "arguments": '{"at": "a"}',
            "status": "completed",
        },
        {
            "type": "function_call",
            "name": "look",
            "namespace": "agents",
            "arguments": '{"at": "b"}',
            "status": "completed",
        },
        {"type": "custom_tool_call", "name": "patch", "input": TEXT, "status": "completed"},
    ]
    calls = [item.call_id for item in whole.output if hasattr(item, "call_id")]
    assert len(set(calls)) == 3
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens

    found = events(ask(engine, **EVERY, stream=True).raise_for_status().text)
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    last = found[-1]
    assert last.type == "response.completed"
    assert said(last.response) == said(whole)
    grown = [""] * len(whole.output)
    for event in found:
        if event.type.endswith(".delta"):
            assert event.item_id == last.response.output[event.output_index].id
            grown[event.output_index] += event.delta
    assert grown == ["Hm.", "Here it is.", '{"at": "a"}', '{"at": "b"}', TEXT]
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert done == last.response.output


def test_the_openai_sdk_accumulates_responses(engine: Any, client: openai.OpenAI) -> None:
    with client.responses.stream(model=engine.scripted, input=ALL, tools=[LOOK]) as stream:
        reply = stream.get_final_response()
    assert reply.output_text == "Here it is."
    assert [item.type for item in reply.output][:3] == ["reasoning", "message", "function_call"]


class Answer(BaseModel):
    """Only one answer fits."""

    number: int

    model_config = {"json_schema_extra": {"properties": {"number": {"enum": [17]}}}}


def test_a_schema_is_enforced_and_parsed(engine: Any, client: openai.OpenAI) -> None:
    reply = client.responses.parse(
        model=engine.scripted, input="x", text_format=Answer, max_output_tokens=200
    )
    assert reply.output_parsed == Answer(number=17)


def test_a_reply_that_was_cut_is_incomplete(engine: Any, client: openai.OpenAI) -> None:
    text = script(Step("one two three four five"))
    reply = client.responses.create(model=engine.scripted, input=text, max_output_tokens=2)
    assert reply.status == "incomplete"
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in reply.output if item.type == "message"] == ["incomplete"]
    found = events(ask(engine, input=text, max_output_tokens=2, stream=True).text)
    assert found[-1].type == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_call_that_was_cut_is_incomplete(engine: Any, stream: bool) -> None:
    text = script(Step(calls=(Call("patch", {"content": TEXT * 9}),)))
    asked = {"input": text, "tools": [PATCH], "max_output_tokens": 30, "stream": stream}
    answer = ask(engine, **asked)
    reply = (
        events(answer.text)[-1].response if stream else Response.model_validate_json(answer.text)
    )
    assert reply.status == "incomplete"
    (item,) = reply.output
    assert item.type == "custom_tool_call"
    assert item.status == "incomplete"
    assert len(item.input) > 9
    assert (TEXT * 9).startswith(item.input)


def formed(definition: str, syntax: str = "lark") -> Any:
    """A custom tool with a grammar."""
    return PATCH | {"format": {"type": "grammar", "syntax": syntax, "definition": definition}}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_the_format_of_a_custom_tool_is_enforced(engine: Any, syntax: str, choice: str) -> None:
    fits = 'say "no"\nnow'
    definition = f"start: {json.dumps(fits)}" if syntax == "lark" else 'say "no"\\nnow'
    lead = "Here it is." if choice == "auto" else ""
    text = script(Step(lead, (Call("patch", {"content": "say what I like"}),)))
    tools = [LOOK, formed(definition, syntax)]
    answer = ask(engine, input=text, tools=tools, tool_choice=choice, max_output_tokens=200)
    reply = Response.model_validate_json(answer.raise_for_status().text)
    call = reply.output[-1]
    assert reply.output_text == lead
    assert call.type == "custom_tool_call"
    assert (call.input, call.status) == (fits, "completed")


def test_a_tool_format_that_does_not_compile_is_refused_by_its_place(engine: Any) -> None:
    space = {**SPACE, "tools": [LOOK, formed("start: nobody")]}
    for tools, place in (
        ([LOOK, formed("(a", "regex")], "tools[1]"),
        ([space], "tools[0].tools[1]"),
        ([PATCH | {"format": {"type": "grammar", "syntax": "gbnf"}}], "tools[0]"),
    ):
        answer = ask(engine, input="x", tools=tools)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, place)
        assert error["message"].startswith(f"{place}.format")


def test_a_recorded_codex_body_is_answered_and_reused(engine: Any) -> None:
    body = json.loads(CODEX.read_text())["body"]
    turns = body["input"]
    turns[3]["content"] = [{"type": "input_text", "text": script(Step("Done."))}]
    asked = {**body, "model": engine.scripted}
    answer = engine.http.post("/v1/responses", json=asked).raise_for_status()
    assert "web_search" in answer.headers["x-mlx-warnings"]
    last = events(answer.text)[-1].response
    assert last.output_text == "Done."
    details = last.usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == last.usage.input_tokens
    again = engine.http.post("/v1/responses", json=asked).raise_for_status()
    usage = events(again.text)[-1].response.usage
    assert usage.input_tokens_details.cached_tokens > 0.9 * usage.input_tokens


def test_a_history_of_items_gives_the_prompt_of_the_same_chat(engine: Any) -> None:
    """The same prompt as the messages of chat, and so the same prefix."""
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "content": "H", "summary": ["unused"]},
        {
            "type": "reasoning",
            "content": [],
            "summary": ["m", {"type": "summary_text", "text": "."}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "a"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": TEXT},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "done"}],
        },
        {"role": "assistant", "content": "I saw."},
        {"role": "user", "content": "go on"},
    ]
    calls = [("c1", "look", '{"at": "a"}'), ("c2", "patch", json.dumps({"content": TEXT}))]
    messages = [
        {"role": "system", "content": "Obey."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "H\n\nm\n\n.",
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
                for i, n, a in calls
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "assistant", "content": "I saw."},
        {"role": "user", "content": "go on"},
    ]
    chat = {"model": engine.scripted, "messages": messages, "max_tokens": 1}
    first = engine.http.post("/v1/chat/completions", json=chat).raise_for_status().json()
    reply = ask(engine, instructions="Obey.", input=items, max_output_tokens=1).json()
    used = first["usage"]["prompt_tokens"]
    assert reply["usage"]["input_tokens"] == used
    assert reply["usage"]["input_tokens_details"]["cached_tokens"] == used - 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"input": [{"type": "input_text", "text": "x"}]}, 400, "input[0].type"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "system", "content": BILLING}]}, 400, "input"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0]"),
        ({"tools": [{}]}, 400, "tools[0]"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}]},
            400,
            "input[0].output",
        ),
        ({"tools": [LOOK, LOOK]}, 400, "tools[1]"),
        ({"tenant": "other"}, 400, "tenant"),
    ],
)
def test_a_refusal_names_the_parameter(
    engine: Any, fields: dict[str, Any], status: int, param: str
) -> None:
    for stream in (False, True):
        answer = ask(engine, **{"input": "x", "stream": stream, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), error
        assert error["type"] == "invalid_request_error"


TURN: Any = [
    {"role": "user", "content": "x"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "One."}]},
]
IMAGE: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
MANY = "[" + "0," * MAX_VALUES + "0]"


CALL: Any = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


def test_a_warning_names_the_part_of_an_item(engine: Any) -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": ["text", IMAGE]}
    user = {"role": "user", "content": [IMAGE]}
    said = ask(engine, input=[*TURN, CALL, output, user], instructions="x", max_output_tokens=1)
    told = said.raise_for_status().headers["x-mlx-warnings"]
    assert "input[4].output[1]: image omitted" in told
    assert "input[5].content[0]: image omitted" in told


@pytest.mark.parametrize("instructions", [None, "Be brief."])
@pytest.mark.parametrize(
    ("items", "place"),
    [
        ([CALL | {"name": ""}], ""),
        ([CALL, CALL | {"name": ""}], ""),
        ([CALL | {"arguments": MANY}], None),
    ],
)
def test_an_error_in_a_conversation_names_the_item(
    engine: Any, items: list[Any], place: str | None, instructions: str | None
) -> None:
    """Also where a message is made of several items: its first one, if not the exact one."""
    given = [*TURN, *items]
    answer = ask(engine, input=given, instructions=instructions)
    error = answer.json()["error"]
    wanted = "input[1]" if place is None else f"input[{len(given) - 1}]{place}"
    assert (answer.status_code, error["param"]) == (400, wanted), error
    assert wanted in error["message"]
    assert "messages" not in error["message"]


def test_a_full_context_fails_with_the_code_for_codex(engine: Any, client: openai.OpenAI) -> None:
    """Codex reads the code of a stream alone."""
    asked: Any = {"model": engine.scripted, "input": "ab " * 4000}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked)
    assert caught.value.code == "context_length_exceeded"
    created, failed = client.responses.create(**asked, stream=True)
    assert (created.type, failed.type) == ("response.created", "response.failed")
    assert failed.response.error.code == "context_length_exceeded"


def test_responses_parameters_without_effect_are_named_in_a_header(engine: Any) -> None:
    more = {"store": True, "truncation": "auto", "max_tool_calls": 3, "metadata": {"a": "b"}}
    more["image"] = {"context_compression": "enabled"}
    hosted = {"tools": [{"type": "web_search_preview"}, {"type": "mcp", "server_label": "s"}]}
    answer = ask(engine, input="x", max_output_tokens=1, **more, **hosted).raise_for_status()
    told = answer.headers["x-mlx-warnings"]
    names = ("store", "truncation", "max_tool_calls", "image")
    for name in (*names, "tools[0] (web_search_preview)", "(mcp)"):
        assert name in told
    assert answer.json()["metadata"] == {"a": "b"}
    quiet = {"store": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"]}
    answer = ask(engine, input="x", max_output_tokens=1, **quiet).raise_for_status()
    assert "x-mlx-warnings" not in answer.headers


def test_a_response_has_equal_log_probabilities_whole_and_streamed(engine: Any) -> None:
    text = script(Step("one two"))
    asked = {"input": text, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    reply = ask(engine, **asked).json()
    (part,) = reply["output"][-1]["content"]
    assert "".join(token["token"] for token in part["logprobs"]) == part["text"]
    assert all(len(token["top_logprobs"]) == 2 for token in part["logprobs"])
    found = events(ask(engine, **asked, stream=True).text)
    deltas = [event for event in found if event.type == "response.output_text.delta"]
    tokens = [token.token for event in deltas for token in event.logprobs]
    assert tokens == [token["token"] for token in part["logprobs"]]


ACCEPTED = Accepted(id="r", model="m", prompt_tokens=1, max_tokens=1)


def streamed(*deltas: Delta) -> tuple[list[Any], list[str]]:
    """The events of a reply of these, and the tokens of its text."""
    stream = Stream(ACCEPTED, ChatTools(), echo_of({}))
    parts = [ACCEPTED, *deltas, Finish(reason="stop")]
    found = events((stream.feed(parts) + b"data: [DONE]\n\n").decode())
    (done,) = (event for event in found if event.type == "response.output_text.done")
    return found, [token.token for token in done.logprobs]


def test_log_probabilities_of_tokens_without_text_are_kept() -> None:
    a, b, c, d = (TokenLogprob(token=x, id=0, logprob=-1.0, bytes=[]) for x in "abcd")
    early, late = Delta(logprobs=[b]), Delta(logprobs=[d])
    thought, text = Delta(reasoning="t", logprobs=[a]), Delta(content="c", logprobs=[c])
    found, tokens = streamed(early, thought, early, text, late, late)
    assert tokens == ["b", "c", "d", "d"]
    items = [event.item.type for event in found if event.type == "response.output_item.done"]
    assert items == ["reasoning", "message"]


def test_the_end_of_a_thought_is_no_token_of_the_message() -> None:
    end, first, rest = (
        TokenLogprob(token=token, id=0, logprob=-1.0, bytes=[*part])
        for token, part in (("</think>", b"</think>"), ("?", b"\xc3"), ("é", b"\xa9"))
    )
    silent = [Delta(logprobs=[end]), Delta(logprobs=[first])]
    _, tokens = streamed(Delta(reasoning="t"), *silent, Delta(content="é", logprobs=[rest]))
    assert tokens == ["?", "é"]


def test_nothing_follows_an_error_in_a_stream() -> None:
    for failed in (Failed.of(EngineUnavailable("gone")), Finish(reason="cancelled")):
        stream = Stream(ACCEPTED, ChatTools(), echo_of({}))
        out = stream.feed([ACCEPTED, Delta(content="a"), failed])
        assert stream.feed([Delta(content="b")]) == b""
        *_, delta, told, last = events(out.decode())
        assert delta.delta == "a"
        assert (told.type, told.code) == ("error", "engine_unavailable")
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert last.response.error.code == "server_error"
