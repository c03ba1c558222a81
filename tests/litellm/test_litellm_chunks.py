"""Events to chunks, without LiteLLM's wrapper around them."""

import pytest

from mlx_provider.errors import EngineUnavailable
from mlx_provider.litellm.streams import ChunkStream
from mlx_provider.protocol.events import (
    Delta,
    Finish,
    TokenLogprob,
    ToolCallDelta,
)


def chunks(events):
    return list(ChunkStream("r", "m", 1).feed(events))


def test_each_kind_of_output_has_its_own_chunk():
    event = Delta(
        reasoning="r",
        content="c",
        tool_calls=[
            ToolCallDelta(index=0, id="a", name="f", arguments="{"),
            ToolCallDelta(index=0, arguments="}"),
            ToolCallDelta(index=1, id="b", name="g"),
        ],
    )
    deltas = [chunk.choices[0].delta for chunk in chunks([event])]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert deltas[0].reasoning_content == "r"
    assert deltas[1].content == "c"
    calls = [delta.tool_calls[0] for delta in deltas[2:]]
    assert [(call.index, call.id, call.function.name) for call in calls if call.id] == [
        (0, "a", "f"),
        (1, "b", "g"),
    ]
    assert "".join(call.function.arguments for call in calls if call.index == 0) == "{}"


def test_several_choices_finish_beside_the_first(scripted):
    out = chunks(
        [
            Delta(index=0, content="a"),
            Delta(index=1, content="b"),
            Finish(index=0, reason="stop"),
            Finish(index=1, reason="length"),
            scripted["done"](),
        ]
    )
    assert [c.choices[0].delta.role for c in out[:2]] == ["assistant", "assistant"]
    beside = out[2].choices
    assert out[2]["choices"] == beside
    assert [(c.index, c.finish_reason) for c in beside] == [(0, None), (1, "length")]
    ends = [c.finish_reason for chunk in out for c in chunk.choices if c.index == 0]
    assert [end for end in ends if end] == ["stop"]
    assert out[-1].choices[0].finish_reason == "stop"


def test_logprobs_travel_with_the_text_and_without():
    token = TokenLogprob(token="x", id=1, logprob=-0.5, bytes=[120], top=[])
    with_text, without = chunks([Delta(content="x", logprobs=[token]), Delta(logprobs=[token])])
    assert with_text.choices[0].logprobs.content[0].logprob == -0.5
    assert without.choices[0].logprobs.content[0].token == "x"


def test_a_cancel_by_the_engine_is_no_finish():
    with pytest.raises(EngineUnavailable):
        chunks([Finish(reason="cancelled")])
