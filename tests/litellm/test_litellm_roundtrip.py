"""Through the real `litellm` functions: what a script sees."""

import copy
import itertools
import threading
import time
from functools import partial

import litellm
import pytest
from litellm.types import utils

from mlx_provider.protocol.events import Delta, Finish, ToolCallDelta

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


def text(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_a_blocking_completion_returns_the_reply_of_the_engine(engine):
    reply = litellm.completion(model="mlx/m", messages=HI)
    assert reply.choices[0].message.content == "Hello world!"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "m"
    assert engine.request.messages == HI


def test_a_blocking_stream_yields_the_reply_of_the_engine(engine):
    chunks = list(litellm.completion(model="mlx/m", messages=HI, stream=True))
    assert text(chunks) == "Hello world!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.fixture
def leaping_clock(monkeypatch):
    """Every reading is a second after the one before."""
    monkeypatch.setattr(time, "time", partial(next, itertools.count(1_800_000_000)))


USAGE = {"include_usage": True}


@pytest.mark.parametrize("options", [None, USAGE])
async def test_an_async_stream_has_one_id_and_one_creation_time(engine, leaping_clock, options):
    stream = await litellm.acompletion(
        model="mlx/m", messages=HI, stream=True, stream_options=options
    )
    chunks = [c async for c in stream]
    assert len({(c.id, c.created) for c in chunks}) == 1
    assert len(chunks) > 1


@pytest.mark.parametrize("options", [None, USAGE])
def test_a_sync_stream_has_one_id_and_one_creation_time(engine, leaping_clock, options):
    chunks = litellm.completion(model="mlx/m", messages=HI, stream=True, stream_options=options)
    assert len({(c.id, c.created) for c in chunks}) == 1


async def test_text_completion_and_routed_streams_have_one_creation_time(engine, leaping_clock):
    text = await litellm.atext_completion(model="mlx/m", prompt="x", stream=True)
    assert len({c.created async for c in text}) == 1
    entry = {"model_name": "a", "litellm_params": {"model": "mlx/m"}}
    routed = await litellm.Router(model_list=[entry]).acompletion("a", messages=HI, stream=True)
    assert len({c.created async for c in routed}) == 1


def test_streams_of_other_providers_keep_one_creation_time(leaping_clock):
    reply = litellm.completion(
        model="openai/gpt-4o", messages=HI, stream=True, mock_response="Hello there"
    )
    assert len({chunk.created for chunk in reply}) == 1


async def test_chunks_are_not_made_twice(engine, scripted, monkeypatch):
    made, makes_id, counts = [], utils.generate_id, set()
    monkeypatch.setattr(utils, "generate_id", lambda: made.append(1) or makes_id())
    for length in (3, 30):
        made.clear()
        deltas = [[Delta(content="a", reasoning="b")] for _ in range(length)]
        engine.script = lambda request, deltas=deltas: [
            *deltas, [Finish(reason="stop"), scripted["done"]()],
        ]  # fmt: skip
        stream = await litellm.acompletion(model="mlx/m", messages=HI, stream=True)
        assert len([chunk async for chunk in stream]) > length
        counts.add(len(made))
    assert len(counts) == 1


async def test_deltas_are_litellms(engine):
    stream = await litellm.acompletion(model="mlx/m", messages=HI, stream=True)
    for chunk in [chunk async for chunk in stream]:
        ours = chunk.choices[0].delta
        theirs = utils.Delta(content=ours.content, role=ours.role)
        assert repr(copy.deepcopy(ours).model_dump()) == repr(theirs.model_dump())
        for name in (*dir(theirs), "content", "images", "refusal", "_absent"):
            if not name.startswith("__"):
                assert hasattr(ours, name) == hasattr(theirs, name), name


async def test_litellm_knows_the_context_after_the_first_request(engine, monkeypatch):
    monkeypatch.setattr(litellm, "model_cost", dict(litellm.model_cost))
    await litellm.acompletion(model="mlx/ctx", messages=HI)
    for told, shown in ((2048, 2048), (4096, 4096), (1024, 4096)):
        engine.context_length = told
        reply = await litellm.acompletion(model="mlx/ctx", messages=HI)
        info = litellm.get_model_info("mlx/ctx")
        assert (info["max_input_tokens"], info["max_output_tokens"]) == (shown, shown)
        assert litellm.completion_cost(reply, model="mlx/ctx") == 0


async def test_a_tool_call_is_delivered_before_the_next_one_begins(engine, scripted):
    heard = threading.Event()

    def script(request):
        yield [
            Delta(tool_calls=[ToolCallDelta(index=0, id="call_1", name="get_weather")]),
            Delta(tool_calls=[ToolCallDelta(index=0, arguments="{}")]),
        ]
        name = "second" if heard.wait(300) else "unheard"
        yield [Delta(tool_calls=[ToolCallDelta(index=1, id="call_2", name=name, arguments="{}")])]
        yield [Finish(reason="tool_calls"), scripted["done"]()]

    engine.script = script
    names = []
    async for chunk in await litellm.acompletion(
        model="mlx/m", messages=HI, tools=TOOLS, stream=True
    ):
        for piece in chunk.choices[0].delta.tool_calls or ():
            names.append(piece.function.name or piece.function.arguments)
        if names == ["get_weather", "{}"]:
            heard.set()
    assert names == ["get_weather", "{}", "second", "{}"]
