"""One choice from tokens to deltas: stops, logprobs, counts, reasons."""

from typing import Any

import pytest

from mlx_provider.chat.output.reply import Reply
from mlx_provider.chat.output.turn_layout import TurnLayout
from mlx_provider.protocol.events import Delta, TokenLogprob

from .conftest import REASONING_PARSERS, TOOL_PARSERS, put_together, read_chunks

HERMES = TOOL_PARSERS["hermes"]
CODER = TOOL_PARSERS["qwen3_coder"]
QWEN3 = REASONING_PARSERS["qwen3"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "c"}]}}\n</tool_call>'


class Characters:
    """A detokenizer whose tokens are characters."""

    pending = False

    def push(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return ""


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token=chr(token), id=token, logprob=-1.0, bytes=[])


def push_all(reply: Reply, text: str) -> list[Delta]:
    return [d for x in text for d in reply.push(ord(x), logprob(ord(x)))]


def by_character(text: str, **formats: Any) -> list[Delta]:
    reply = Reply(Characters(), **formats)
    return push_all(reply, text) + reply.finish("stop")[0]


# ---- tool calls


def test_a_call_is_streamed_as_its_name_and_then_pieces_of_arguments() -> None:
    pieces = [p for d in by_character(CALL, tool_parser=HERMES) for p in d.tool_calls]
    assert (pieces[0].id, pieces[0].name) == ("call_0", "f")
    assert all(p.id is None and p.name is None for p in pieces[1:])
    assert "".join(p.arguments for p in pieces) == '{"a": [1, {"b": "c"}]}'
    assert len(pieces) > 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n{long}\n</parameter>\n"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">{long}'),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>{long}"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
                         '{{"a": "{long}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{{"a": "{long}'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
                    '<|tool_call_argument_begin|>{{"a": "{long}'),
        ("llama3_json", '{{"name": "f", "parameters": {{"a": "{long}'),
        ("gemma4", '<|tool_call>call:f{{a:<|"|>{long}'),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{{"a": "{long}'),
    ],
)  # fmt: skip
def test_a_long_string_is_streamed_before_it_ends(name: str, text: str) -> None:
    tools = [_tool("f", {"a": {"type": "string"}})]
    reply = Reply(Characters(), tool_parser=TOOL_PARSERS[name], tools=tools)
    deltas = push_all(reply, text.format(long="word " * 40))
    pieces = [p for d in deltas for p in d.tool_calls]
    assert pieces[0].name == "f"
    assert "".join(p.arguments for p in pieces).count("word") >= 38


def _tool(name: str, properties: dict[str, Any], **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_without_parallel_calls_only_the_first_call_is_read() -> None:
    found = read_chunks([CALL + CALL], tool_parser=HERMES, parallel=False)
    assert len(found.calls) == 1


def test_call_ids_come_from_the_given_function() -> None:
    deltas = by_character(CALL + CALL, tool_parser=HERMES, ids=lambda n: f"call_x{n}")
    assert [p.id for d in deltas for p in d.tool_calls if p.id] == ["call_x0", "call_x1"]


def test_a_cut_call_is_partial_and_keeps_the_finish_reason() -> None:
    reply = Reply(tool_parser=HERMES)
    deltas = reply.push_text(CALL[:45])
    last, reason = reply.finish("length")
    found = put_together(deltas + last, reason)
    assert found.calls[0][0] == "f"
    assert found.whole_calls == []
    assert (found.content, reason) == ("", "length")
    assert reply.complete_calls == 0


def test_a_complete_call_without_its_closing_tag_is_read() -> None:
    found = read_chunks([CALL.removesuffix("\n</tool_call>")], tool_parser=HERMES)
    assert found.whole_calls == [("f", {"a": [1, {"b": "c"}]})]
    assert found.finish_reason == "tool_calls"


def test_length_stays_length_after_whole_calls() -> None:
    reply = Reply(tool_parser=HERMES)
    reply.push_text(CALL + "and then")
    assert reply.finish("length")[1] == "length"


def test_arguments_that_become_invalid_stay_partial() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>tail'
    found = read_chunks(list(text), tool_parser=HERMES)
    assert found.calls == (("f", '{"a": 1'),)
    assert (found.content, found.finish_reason) == (text, "stop")


def test_raw_line_ends_and_trailing_commas_become_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "x\ny\t", "b": [1, ], }}</tool_call>'
    assert read_chunks(list(text), tool_parser=HERMES).whole_calls == [
        ("f", {"a": "x\ny\t", "b": [1]})
    ]


# ---- types


DEFS = {"P": {"type": "object"}, "A B": {"anyOf": [{"type": "string"}]}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "number"}, "5.0", 5.0),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "integer"}, "007", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"type": "array"}, "(1, 2)", [1, 2]),
        ({"type": "array"}, "not a list", "not a list"),
        ({"$ref": "#/$defs/P"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/A%20B/anyOf/0"}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "12", "12"),
    ],
)
def test_value_types_come_from_the_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    tools = [_tool("f", {"a": schema}, **{"$defs": DEFS})]
    reply = f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>"
    found = read_chunks(list(reply), tool_parser=CODER, tools=tools)
    assert found.whole_calls == [("f", {"a": value})]
    assert type(found.whole_calls[0][1]["a"]) is type(value)


# ---- stop strings


@pytest.mark.parametrize("stop", ["STOP", "ST", "OP!", "OP! g"])
def test_a_stop_string_across_tokens_ends_the_text_before_it(stop: str) -> None:
    reply = Reply(Characters(), stops=[stop])
    deltas = push_all(reply, "so STOP! go")
    assert reply.stopped
    last, reason = reply.finish("stop")
    shown = "".join(d.content for d in deltas + last)
    assert shown == "so STOP! go"[: "so STOP! go".index(stop)]
    assert reason == "stop"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    for chunks in (["abcdef"], list("abcdef")):
        assert read_chunks(chunks, stops=["bcde", "cd"]).content == "ab"


@pytest.mark.parametrize("stop", ["answer", "\n\n", "think", "</think>", "x", '"a"', "tool_call"])
def test_stop_strings_act_on_the_answer_alone(stop: str) -> None:
    """Not in thoughts, in calls, or in the white space around them."""
    text = f"<think>The answer\n\nis x</think>\n\nHello.\n\n{CALL}"
    formats = {
        "reasoning_parser": QWEN3,
        "tool_parser": HERMES,
        "layout": TurnLayout("", "", "\n\n", "\n\n"),
    }
    for chunks in ([text], list(text)):
        found = read_chunks(chunks, stops=[stop], **formats)
        assert found == read_chunks(chunks, **formats)
        assert (found.reasoning, found.content) == ("The answer\n\nis x", "Hello.")
        assert found.whole_calls == [("f", {"a": [1, {"b": "c"}]})]


def test_a_stop_string_inside_a_thought_does_not_end_the_reply() -> None:
    text = "<think>a STOP\n\nb</think>\n\nc\n\nd STOP e"
    for stop, content in (("STOP", "c\n\nd "), ("\n\n", "c")):
        found = read_chunks(list(text), reasoning_parser=QWEN3, tool_parser=HERMES, stops=[stop])
        assert (found.reasoning, found.content) == ("a STOP\n\nb", content)


def test_a_stop_string_in_an_unfinished_call_ends_the_reply() -> None:
    """A call that was none is shown at the end of the reply."""
    reply = Reply(tool_parser=HERMES, stops=["STOP"])
    deltas = reply.push_text('<tool_call>{"a": "STOP')
    last, reason = reply.finish("length")
    assert (put_together(deltas + last, reason).content, reason) == ('<tool_call>{"a": "', "stop")


def test_a_stop_string_does_not_reach_over_the_end_of_a_thought() -> None:
    found = read_chunks(list("<think>ST</think>OP"), reasoning_parser=QWEN3, stops=["STOP"])
    assert (found.reasoning, found.content) == ("ST", "OP")


def test_a_partial_stop_string_before_a_call_is_content() -> None:
    found = read_chunks(list("so ST" + CALL), tool_parser=HERMES, stops=["STOP"])
    assert (found.content, len(found.calls)) == ("so ST", 1)


def test_text_after_a_stop_string_is_dropped() -> None:
    reply = Reply(stops=["X"])
    reply.push_text("aX")
    assert reply.push_text("more") == []
    assert reply.finish("stop") == ([], "stop")


# ---- thoughts


@pytest.mark.parametrize("opened", [True, False])
def test_a_thought_followed_by_a_call_is_read_as_both(opened: bool) -> None:
    text = ("" if opened else "<think>") + f"let me see\n</think>\n\n{CALL}"
    found = read_chunks(
        list(text), reasoning_parser=QWEN3, tool_parser=HERMES, reasoning_open=opened
    )
    assert (found.reasoning, found.content) == ("let me see", "")
    assert len(found.whole_calls) == 1


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        (f"hm {CALL}</think>done", True, "hm", "done"),
        ("use <tool_call> to call</think>ok", True, "use <tool_call> to call", "ok"),
        ("on and on </th", True, "on and on </th", ""),
        ("<think>a</think>b<think>c</think>d", None, "ac", "bd"),
        ("<think>\nhm\n</think>\n\n  code", False, "hm", "  code"),
    ],
    ids=["a call ends it", "a mentioned marker", "never closed", "opened again", "white space"],
)
def test_a_thought_and_what_follows(
    text: str, opened: bool | None, reasoning: str, content: str
) -> None:
    formats = {"reasoning_parser": QWEN3, "tool_parser": HERMES, "reasoning_open": opened}
    found = read_chunks(list(text), **formats)
    assert (found.reasoning, found.content) == (reasoning, content)
    assert len(found.whole_calls) == text.count(CALL)


def test_in_reasoning_and_the_reasoning_token_count_follow_every_token() -> None:
    reply = Reply(Characters(), reasoning_parser=QWEN3, reasoning_open=True)
    assert reply.in_reasoning
    push_all(reply, "abc</think>")
    assert not reply.in_reasoning
    push_all(reply, "\n\nxyz")
    assert reply.reasoning_tokens == len("abc</think>")


# ---- logprobs


def test_every_logprob_is_delivered_with_its_text() -> None:
    text = "so <tool STOP no" + CALL
    reply = Reply(Characters(), tool_parser=HERMES, stops=["STOPS"])
    deltas = push_all(reply, text) + reply.finish("stop")[0]
    assert [x.token for d in deltas for x in d.logprobs] == list(text)
    shown = tokens = ""
    for delta in deltas:
        shown += delta.content
        tokens += "".join(x.token for x in delta.logprobs)
        if delta.content:
            assert tokens == shown


def test_logprobs_of_a_stop_string_are_removed() -> None:
    reply = Reply(Characters(), stops=["STOP"])
    deltas = push_all(reply, "ab STOP") + reply.finish("stop")[0]
    assert "".join(x.token for d in deltas for x in d.logprobs) == "ab "


def test_reasoning_content_and_calls_keep_their_order_in_one_push() -> None:
    reply = Reply(tool_parser=HERMES, reasoning_parser=QWEN3, index=3)
    deltas = reply.push_text(f"<think>a</think>b{CALL}c<think>d</think>e")
    kinds = [(d.reasoning, d.content, bool(d.tool_calls)) for d in deltas]
    assert kinds == [("a", "b", True), ("", "c", False), ("d", "e", False)]
    assert {d.index for d in deltas} == {3}
