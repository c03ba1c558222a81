"""Responses and Messages requests: what LiteLLM's bridges would drop is refused by its place."""

import json
import sys
from types import ModuleType, SimpleNamespace

import litellm
import pytest

from histories import EACH, NAMES, PARALLEL, histories, said
from mlx_provider.chat.messages.normalise import normalise
from mlx_provider.protocol.events import Delta, Finish, TokenLogprob

from .conftest import done

U = {"role": "user", "content": "x"}
PNG = "data:image/png;base64,aGk="
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def output(parts, **more):
    return {"type": "function_call_output", "call_id": "c", "output": parts, **more}


def user(*parts):
    return {"role": "user", "content": list(parts)}


TEXT = {"type": "input_text", "text": "a"}
REFUSAL = {"type": "refusal", "refusal": "no"}

ITEMS = [
    ([U, user(TEXT, {"type": "foo", "bar": 1})], "input[1].content[1].type is 'foo'"),
    ([user({"type": "foo", "text": "a"})], "input[0].content[0].type is 'foo'"),
    ([user(TEXT, {"type": "input_audio"})], "input[0].content[1].type is 'input_audio'"),
    ([user(TEXT, {"type": "input_file", "file_data": "x"})], "input[0].content[1].type"),
    ([user({"type": "input_image", "file_id": "f"})], "input[0].content[0].image_url is missing"),
    ([user(5)], "input[0].content[0] must be an object, got int"),
    ([{"role": "user", "content": 5}], "input[0].content must be a text or a list, got int"),
    ([{"role": "robot", "content": "x"}], "input[0].role is 'robot'"),
    ([U, {"type": ["x"]}], "input[1].type is ['x']"),
    ([U, "x"], "input[1] must be an object, got str"),
    ([U, output("a", call_id="")], "input[1].call_id is missing"),
    ([user(TEXT, {"type": "input_text"})], "input[0].content[1].text must be a text"),
    ([user({"text": None})], "input[0].content[0].text must be a text"),
    ([U, output([{"type": "input_text", "txt": "a"}])], "input[1].output[0].text must be a text"),
    ([U, output({"temperature": 21})], "input[1].output must be a text or a list, got dict"),
    (5, "input must be a text or a list, got int"),
]


@pytest.mark.parametrize(("sent", "words"), ITEMS)
async def test_responses_items_that_the_bridge_would_drop_are_refused(engine, sent, words):
    with pytest.raises(litellm.BadRequestError) as caught:
        await litellm.aresponses(model="mlx/m", input=sent)
    assert words in str(caught.value)
    assert not engine.requests


@pytest.mark.parametrize("tool", [{}, {"type": None}, {"type": 5}, {"type": ""}])
async def test_a_tool_without_a_type_is_refused(engine, tool):
    with pytest.raises(litellm.BadRequestError, match=r"tools\[0\].type is"):
        await litellm.aresponses(model="mlx/m", input="x", tools=[tool])
    assert not engine.requests


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, {"id": "p"}, "is not supported") for name in ("prompt", "background")),
        *((name, 5, "must be a list, got") for name in ("include", "tools")),
    ],
)
async def test_wrong_responses_parameters_are_refused(engine, name, value, words):
    with pytest.raises(litellm.BadRequestError, match=f"{name} {words}"):
        await litellm.aresponses(model="mlx/m", input="x", **{name: value})


async def test_responses_items_that_the_bridge_supports_reach_the_engine(engine):
    await litellm.aresponses(
        model="mlx/m",
        input=[
            {"role": "developer", "content": "rules"},
            user(TEXT, {"type": "input_image", "image_url": PNG}),
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            CALL,
            output([TEXT, {"type": "input_image", "image_url": PNG}]),
            {"type": "message", "role": "assistant", "content": [{"type": "output_text"} | TEXT]},
            {"type": "message", "role": "assistant", "content": [REFUSAL]},
            {"type": None, **U},
        ],
    )
    roles = [message["role"] for message in engine.request.messages]
    assert roles == ["developer", "user", "assistant", "tool", "assistant", "assistant", "user"]
    assert engine.request.messages[5]["content"] == [{"type": "text", "text": "no"}]
    assert [part["type"] for part in engine.request.messages[3]["content"]] == ["text", "image_url"]


async def test_the_output_of_a_response_can_be_sent_back_as_input(engine):
    first = await litellm.aresponses(model="mlx/m", input="x")
    await litellm.aresponses(model="mlx/m", input=[U, *first.output, U])
    assert [m["role"] for m in engine.request.messages] == ["user", "assistant", "user"]


def result(*parts):
    return {"type": "tool_result", "tool_use_id": "t", "content": list(parts)}


BLOCK = {"type": "text", "text": "a"}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "a"}}
MESSAGES = [
    ([U, user(BLOCK, {"type": "foo"})], "messages[1].content[1].type is 'foo'"),
    ([user(BLOCK, DOCUMENT)], "messages[0].content[1].type is 'document'"),
    (
        [user({"type": "image", "source": {"type": "file"}})],
        "messages[0].content[0].source.type is 'file'",
    ),
    ([user({"type": "image"})], "messages[0].content[0].source must be an object"),
    ([user(BLOCK, {"type": "text"})], "messages[0].content[1].text must be a text"),
    ([user({"type": "text", "text": None})], "messages[0].content[0].text must be a text"),
    ([user(result({"type": "text"}))], "messages[0].content[0].content[0].text must be a text"),
    (
        [user(BLOCK, {"type": "image", "source": {"type": "base64", "media_type": "image/png"}})],
        "messages[0].content[1].source.data must be a text",
    ),
    (
        [user(BLOCK, {"type": "image", "source": {"type": "url", "url": ""}})],
        "messages[0].content[1].source.url must be a text",
    ),
    ([{"role": "robot", "content": "x"}], "messages[0].role is 'robot'"),
    ([{"content": "x"}], "messages[0].role is None"),
    (["x"], "messages[0] must be an object, got str"),
    ([user("x")], "messages[0].content[0] must be an object, got str"),
    ([], "messages must be a list of at least one message"),
]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(({"messages": sent}, words) for sent, words in MESSAGES),
        ({"tools": [{"name": "f", "input_schema": {}}, "g"]}, "tools[1] must be an object"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name must be a text"),
        ({"tool_choice": "any"}, "tool_choice must be an object"),
        ({"system": [{"type": "text"}]}, "system[0].text must be a text"),
    ],
)
async def test_what_the_messages_bridge_would_drop_or_trips_it(engine, given, words):
    asked = {"max_tokens": 5, "messages": [U], **given}
    with pytest.raises(litellm.BadRequestError) as caught:
        await litellm.anthropic.messages.acreate(model="mlx/m", **asked)
    assert words in str(caught.value)
    assert not engine.requests


async def ask(engine, path, turns):
    """What reaches the template of an engine behind LiteLLM, and the warnings."""
    if path == "/v1/messages":
        asked = {"max_tokens": 5, "messages": turns}
        await litellm.anthropic.messages.acreate(model="mlx/m", **asked)
    elif path == "/v1/responses":
        await litellm.aresponses(model="mlx/m", input=turns)
    else:
        await litellm.acompletion(model="mlx/m", messages=turns)
    done = normalise(engine.request.messages, hoist_system=False)
    return json.dumps(done.messages, ensure_ascii=False), done.warnings


@pytest.mark.parametrize(("path", "case"), EACH, ids=NAMES)
async def test_parts_of_other_servers_become_text(engine, path, case):
    for turns, _ in histories(path, case):
        text, _ = await ask(engine, path, turns)
        assert [w for w in case["words"] if json.dumps(w)[1:-1] not in text] == []
        assert [w for w in case.get("hidden", ()) if w in text] == []


@pytest.mark.parametrize("path", PARALLEL)
async def test_results_of_parallel_calls_follow_the_order_of_the_calls(engine, path):
    text, warnings = await ask(engine, path, [*said("both?"), *PARALLEL[path]])
    assert text.index("sun in Ulm") < text.index("sun in Bonn")
    assert warnings == ()


WORDS = [
    TokenLogprob(id=1, token=word, logprob=-0.5, bytes=list(word.encode())) for word in ("a", "b")
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_contains_its_log_probabilities(engine, stream):
    steps = [[Delta(content=word.token, logprobs=[word])] for word in WORDS]
    engine.script = lambda request: [*steps, [Finish(reason="stop"), done()]]
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": stream}
    made = await litellm.aresponses(model="mlx/m", input="x", **asked)
    if stream:
        events = [event async for event in made]
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        found = [token for event in deltas for token in getattr(event, "logprobs", None) or []]
        assert [token["token"] for token in found] == ["a", "b"]
        made = events[-1].response
    assert (engine.request.logprobs, engine.request.top_logprobs) == (True, 2)
    (text,) = made.output[0].content
    assert [(each["token"], each["logprob"]) for each in text.logprobs] == [
        ("a", -0.5),
        ("b", -0.5),
    ]


async def test_a_text_format_that_the_bridge_would_drop_is_refused(engine):
    with pytest.raises(litellm.BadRequestError, match=r"text\.format\.type is 'yaml'"):
        await litellm.aresponses(model="mlx/m", input="x", text={"format": {"type": "yaml"}})
    assert not engine.requests


async def test_a_system_block_that_the_bridge_would_drop_is_refused(engine):
    with pytest.raises(litellm.BadRequestError, match=r"system\[1\]\.type is 'image'"):
        await litellm.anthropic.messages.acreate(
            model="mlx/m", max_tokens=5, messages=[U], system=[BLOCK, {"type": "image"}]
        )


@pytest.fixture
def store(monkeypatch):
    """LiteLLM's session store: a proxy module whose database answers with these rows."""
    rows = []

    async def query_raw(query, name):
        names = name if isinstance(name, list) else [name]  # 1.109 asks for several
        return [row for row in rows if row["request_id"] in names]

    proxy = ModuleType("litellm.proxy.proxy_server")
    proxy.prisma_client = SimpleNamespace(db=SimpleNamespace(query_raw=query_raw))
    proxy.disable_spend_logs = True  # a single look
    monkeypatch.setitem(sys.modules, proxy.__name__, proxy)
    return rows


LOST = "previous_response_id: no messages are stored for this response; send the whole"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_previous_response_id_is_refused(engine, stream):
    with pytest.raises(litellm.BadRequestError, match=LOST):
        await litellm.aresponses(
            model="mlx/m", input="again", previous_response_id="resp_1", stream=stream
        )
    assert not engine.requests


async def test_a_stored_previous_response_reaches_the_engine(engine, store):
    answer = {"choices": [{"message": {"role": "assistant", "content": "Hello Maria"}}]}
    asked = {"input": "My name is Maria."}
    store += [
        {
            "request_id": "resp_1",
            "session_id": "s",
            "proxy_server_request": asked,
            "response": answer,
        },
        {"request_id": "resp_2", "session_id": "t", "proxy_server_request": {}, "response": {}},
    ]
    await litellm.aresponses(model="mlx/m", input="again", previous_response_id="resp_1")
    assert [message["content"] for message in engine.request.messages] == [
        "My name is Maria.",
        "Hello Maria",
        "again",
    ]
    for unknown in ("resp_2", "resp_3"):  # logged without its messages; not logged
        with pytest.raises(litellm.BadRequestError, match=LOST):
            await litellm.aresponses(model="mlx/m", input="x", previous_response_id=unknown)
