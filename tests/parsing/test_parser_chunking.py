"""What a reply holds does not depend on how its text is cut, and nothing gets lost."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_provider.records import Reading, TextReader, ToolCall, ToolParser, Tools
from mlx_provider.testing.conformance.calls import FRAGMENTS, cut, replies

from .conftest import REASONING_PARSERS, TOOL_PARSERS, read_chunks

quick = settings(derandomize=True)
NAMES = sorted({parser.name for parser in TOOL_PARSERS.values()})
THOUGHTS = sorted({parser.name for parser in REASONING_PARSERS.values()})


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_any_cut_gives_the_same_reply(name: str, data: st.DataObject) -> None:
    parser = TOOL_PARSERS[name]
    text = data.draw(replies(parser.visible()))
    thoughts = data.draw(st.sampled_from([None, *THOUGHTS]))
    formats: dict[str, Any] = {
        "tool_parser": parser,
        "reasoning_parser": REASONING_PARSERS[thoughts] if thoughts else None,
        "reasoning_open": data.draw(st.sampled_from([None, True, False])),
        "stops": data.draw(st.sampled_from([[], ["STOP"], ["pl", "lain"], ["\n\n", "v<"]])),
        "parallel": data.draw(st.booleans()),
    }
    at_once = read_chunks([text], **formats)
    assert read_chunks(list(text), **formats) == at_once
    sizes = data.draw(st.lists(st.integers(0, 12), max_size=len(text)))
    assert read_chunks(cut(text, sizes), **formats) == at_once


@pytest.mark.parametrize("name", NAMES)
@quick
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_plain_text_passes_a_tool_parser_unchanged(name: str, parts: list[str]) -> None:
    """Beginnings of markers that never become one are text, to the last character."""
    text = "".join(parts)
    parser = TOOL_PARSERS[name]
    if any(marker in text for marker in parser.visible() if len(marker) > 2):
        return
    for chunks in ([text], list(text)):
        found = read_chunks(chunks, tool_parser=parser)
        assert (found.content, found.calls, found.finish_reason) == (text, (), "stop")


@pytest.mark.parametrize("name", THOUGHTS)
@quick
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_plain_text_passes_a_reasoning_parser_unchanged(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    parser = REASONING_PARSERS[name]
    found = read_chunks(list(text), reasoning_parser=parser, reasoning_open=False)
    assert found.content == parser.prefix + text or not text.strip()  # which harmony drops
    assert found.reasoning == ""


def test_openers_alone_give_no_call(tool_parsers: dict[str, Any], read: Callable[..., Any]) -> None:
    """Every parser gives up on text that is nothing but openers."""
    for parser in set(tool_parsers.values()):
        text = (parser.start or "<|start|>") * 200
        assert read([text], tool_parser=parser).calls == ()


@pytest.mark.parametrize("name", NAMES)
def test_endlessly_nested_text_gives_no_calls_and_no_error(name: str) -> None:
    """Nothing that a model writes raises or is read for ever; not the deepest nesting either."""
    parser = TOOL_PARSERS[name]
    heads = ['{"name": "f", "arguments": ', "call:f{a:", "f[ARGS]", "functions.f:0", "[f(a=", ""]
    for opener in (parser.start, *parser.first, *parser.openers()[-1:]):
        for head in heads:
            for nest in ("[", '{"a": ', "{a:", "f(a="):
                found = read_chunks([opener + head, nest * 150], tool_parser=parser)
                assert found.whole_calls == []


def test_a_third_party_parser_that_consumes_nothing_does_not_hang() -> None:
    """A stranger's parser that leaves its marker unread does not hold the engine up."""

    def scan(reader: TextReader, tools: Tools) -> Reading[None]:
        yield from reader.peek()

    parser = ToolParser(name="idle", start="<c>", end="</c>", scan=scan)
    assert read_chunks(["a<c>b"], tool_parser=parser).content == "a<c>b"


@pytest.mark.parametrize(
    ("value", "called"),
    [
        *(("</call>" * 16, True), ("</call>" * 17, False), ("</call> <call>", False)),
        *((count * "<call>rm {}</call>", count < 9) for count in (8, 9, 40)),
    ],
)
def test_a_plugin_parser_with_only_start_end_and_parse_reads_calls(
    value: str, called: bool
) -> None:
    """`start`, `end` and `parse` are all that a format needs. No value runs as a call."""

    def parse(text: str, tools: Tools) -> list[ToolCall]:
        name, _, arguments = text.partition(" ")
        json.loads(arguments)
        return [ToolCall(name, arguments)]

    parser = ToolParser("angle", "<call>", "</call>", parse)
    call = f"<call>f {json.dumps({'a': value})}</call>"
    text = f"so {call}<call>bad</call><call>g {{}}</call> end"
    for chunks in ([text], list(text)):
        found = read_chunks(chunks, tool_parser=parser)
        assert found.whole_calls == [("f", {"a": value})] * called + [("g", {})]
        assert found.content == f"so {'' if called else call}<call>bad</call> end"
