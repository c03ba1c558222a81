"""A third party's parser that raises: the reply goes on, and the parser is named."""

import json
from typing import Any

import pytest

from mlx_provider.chat.output.reply import Reply
from mlx_provider.cli.parse import parse_lines
from mlx_provider.errors import BadRequest
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records import Reading, ReasoningParser, TextReader, ToolCall, ToolParser, Tools
from mlx_provider.serving.structure import check_readable

from .conftest import TOOL_PARSERS, put_together, read_chunks, tool


class Odd(Exception):
    """Of no class that anybody expects."""


def angle(text: str, tools: Tools) -> list[ToolCall]:
    call = json.loads(text)
    return [ToolCall(call["name"], json.dumps(call["args"]))]


def wrong(text: str, tools: Tools) -> list[Any]:
    return [ToolCall(3, {})]  # type: ignore[arg-type]


def early(reader: TextReader, tools: Tools) -> Reading[None]:
    yield from reader.expect("<call>")
    raise Odd("no reason")


def late(reader: TextReader, tools: Tools) -> Reading[None]:
    yield from reader.expect("<call>")
    reader.call("f")
    reader.arguments("{")
    yield from reader.char()
    raise SystemExit(3)


def whole(reader: TextReader, tools: Tools | None) -> Reading[None]:
    yield from reader.expect("so ")
    reader.reason()
    reader.hold_calls()
    raise Odd


BROKEN = {
    "angle": ToolParser("angle", "<call>", "</call>", angle),
    "wrong": ToolParser("wrong", "<call>", "</call>", wrong),
    "early": ToolParser("early", "<call>", "</call>", scan=early),
    "held": ToolParser("held", "<call>", "</call>", scan=late, atomic=True),
    "late": ToolParser("late", "<call>", "</call>", scan=late),
}
TEXT = 'so <call>{"name": "f"}</call> end'


@pytest.mark.parametrize("name", BROKEN)
def test_text_of_a_failed_parser_is_content(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for chunks in ([TEXT], list(TEXT)):
        caplog.clear()
        reply = Reply(tool_parser=BROKEN[name])
        deltas = [delta for chunk in chunks for delta in reply.push_text(chunk)]
        last, reason = reply.finish("stop")
        found = put_together(deltas + last, reason)
        assert (found.content, found.whole_calls, found.finish_reason) == (TEXT, [], "stop")
        (fault,) = reply.faults
        assert fault.startswith(f"tool parser {name!r} failed: ")
        assert fault in caplog.text


def test_too_deeply_nested_text_is_content_and_no_parser_fault() -> None:
    """The model wrote it: a parser in ten lines need not know how deep Python can read."""
    nested = f'<call>{{"name": "f", "args": {"[" * 100_000}</call> end'
    reply = Reply(tool_parser=BROKEN["angle"])
    found = put_together(reply.push_text(nested) + reply.finish("stop")[0], "stop")
    assert (found.content, found.calls, reply.faults) == (nested, (), [])


def test_text_after_a_failed_reasoning_parser_becomes_content() -> None:
    reply = Reply(reasoning_parser=ReasoningParser("mine", "", "", whole=whole))
    deltas = reply.push_text("so the rest") + reply.finish("stop")[0]
    assert put_together(deltas, "stop").content == "the rest"
    (fault,) = reply.faults
    assert fault.startswith("reasoning parser 'mine' failed: Odd: (")
    assert "test_parser_faults, line" in fault
    assert not reply.in_reasoning


class Registry:
    """Knows one broken parser and one that works."""

    def tool_parser(self, name: str) -> ToolParser:
        return BROKEN.get(name) or TOOL_PARSERS[name]


@pytest.mark.parametrize("name", BROKEN)
def test_the_parse_command_names_the_parser_and_goes_on(name: str) -> None:
    lines = [
        json.dumps({"id": 1, "tool_parser": name, "chunks": [TEXT]}),
        json.dumps({"id": 2, "tool_parser": "hermes", "chunks": ["fine"]}),
    ]
    registry: Any = Registry()
    bad, good = parse_lines(lines, registry)
    assert bad["error"]["code"] == "plugin_error"
    assert f"tool parser {name!r} failed" in bad["error"]["message"]
    assert (bad["id"], bad["content"], good["content"]) == (1, TEXT, "fine")
    assert "error" not in good


@pytest.mark.parametrize("name", ["angle", "early"])
def test_a_call_that_the_parser_cannot_read_is_not_enforced(name: str) -> None:
    request = GenerateRequest(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        tools=[tool("f", a="string")],
        tool_choice="required",
    )
    parser = BROKEN[name]
    with pytest.raises(BadRequest, match=f"tool 'f' .*tool parser '{name}' failed") as caught:
        check_readable(request, parser)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("name", sorted({parser.name for parser in TOOL_PARSERS.values()}))
@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_empty_names_are_no_parser_fault_and_no_call(name: str, blank: str) -> None:
    parser = TOOL_PARSERS[name]
    schema = tool("f", **{blank: "string"})["function"]["parameters"]
    for called in ("f", blank):
        text = parser.call_grammar().write(called, {blank: "v"}, schema)
        found = read_chunks([text], tool_parser=parser)
        assert (found.faults, "" in dict(found.calls)) == ((), False)
