"""White space at the ends of a text value is the value's own, as files begin and end with it."""

import sys
from typing import Any

import pytest

from .conftest import TOOL_PARSERS, read_chunks, tool, written

PARSERS = {parser.name: parser for parser in TOOL_PARSERS.values()}
VALUES = ["", "\n", "\n\n", " ", "x\n", "\nx", "\n\nx\n\n", " x ", "\tx\r\n", "\r\n\n x\n \n"]


@pytest.mark.parametrize("name", ["llama4_pythonic", "lfm2", "olmo3"])
def test_a_number_beyond_the_float_range_becomes_the_largest_float(name: str) -> None:
    text = written(PARSERS[name], "save", {"n": 0}).replace("=0", "=-964e22717")
    found = read_chunks([text], tool_parser=PARSERS[name], tools=[tool("save", n="number")])
    assert found.whole_calls == [("save", {"n": -sys.float_info.max})]


@pytest.mark.parametrize("declared", ["string", "", "string or list"])
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_text_value_keeps_its_white_space(name: str, declared: str) -> None:
    types = {"": {}, "string or list": {"type": ["string", "array"]}}
    listed = tool("save", text="string", more="string")
    schema = listed["function"]["parameters"]
    if declared != "string":
        schema["properties"]["text"] = types[declared]
    for value in VALUES:
        arguments = {"text": value, "more": "\n"}
        text = written(PARSERS[name], "save", arguments)
        for chunks in ([text], list(text)):
            found = read_chunks(chunks, tool_parser=PARSERS[name], tools=[listed])
            assert found.whole_calls == [("save", arguments)], text


UNTYPED: dict[str, Any] = {
    "free": {"description": "any value"},
    "few": {"items": {"type": "integer"}},
    "deep": {"properties": {"a": {}}},
    "pick": {"enum": [1, 2, "3"]},
    "either": {"anyOf": [{"const": "5"}, {"const": 6}]},
    "one": {"oneOf": [{"enum": [1]}, {"enum": ["2"]}]},
}


@pytest.mark.parametrize("name", [n for n in sorted(PARSERS) if PARSERS[n].call_grammar().tagged])
def test_a_value_without_a_declared_type_is_read_as_written(name: str) -> None:
    schema = {"type": "object", "properties": UNTYPED}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for key, value in (
        ("free", {"k": [1, 2]}),
        ("free", [1, {"x": "</parameter>"}]),
        ("free", "[1] is first"),
        ("free", "{no JSON}"),
        ("few", [1, 2]),
        ("deep", {"a": 1}),
        ("pick", "3"),
        ("pick", 2),
        ("either", "5"),
        ("either", 6),
        ("one", "2"),
    ):
        text = PARSERS[name].call_grammar().write("f", {key: value}, schema)
        for chunks in ([text], list(text)):
            found = read_chunks(chunks, tool_parser=PARSERS[name], tools=tools)
            assert found.whole_calls == [("f", {key: value})], text
