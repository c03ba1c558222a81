"""`mlx-provider parse`: JSON lines in, JSON lines out."""

import json
from typing import Any

import pytest

from mlx_provider.cli.parse import parse_lines
from named_plugins import discover

from .conftest import TOOL_PARSERS

REGISTRY = discover("tool_parsers", "reasoning_parsers")
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def parse(*lines: Any) -> list[dict[str, Any]]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return list(parse_lines(texts, REGISTRY))


def test_parse_prints_calls_thoughts_and_content_of_each_line() -> None:
    assert parse(
        {"id": "1", "tool_parser": "qwen", "chunks": ["so", CALL[:9], CALL[9:]], "tools": None},
        {"id": 2, "reasoning_parser": "qwen3", "chunks": ["a</think>b"]},
        {"id": 3, "reasoning_parser": "qwen3", "chunks": ["abc"], "prompt_opened_think": True},
        {
            "id": 4,
            "tool_parser": "hermes",
            "reasoning_parser": "qwen3",
            "chunks": list("<think>a</think>" + CALL),
        },
    ) == [
        {
            "id": "1",
            "content": "so",
            "reasoning_content": None,
            "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
        },
        {"id": 2, "content": "b", "reasoning_content": "a", "tool_calls": []},
        {"id": 3, "content": None, "reasoning_content": "abc", "tool_calls": []},
        {
            "id": 4,
            "content": None,
            "reasoning_content": "a",
            "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
        },
    ]


def test_a_cut_call_is_not_among_the_calls() -> None:
    (found,) = parse({"id": 1, "tool_parser": "hermes", "chunks": [CALL[:-14]]})
    assert found["tool_calls"] == []
    assert found["unfinished_calls"] == [{"name": "f", "arguments": '{"a": 1'}]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("no json", "Expecting value"),
        ('{"chunks": ' + "[" * 100_000, "recursion"),
        ("[1]", "dictionary"),
        ({"id": 7, "chunks": ["a"]}, "name a tool_parser"),
        ({"id": 7, "tool_parser": "nobody", "chunks": ["a"]}, "no tool parser 'nobody'"),
        ({"id": 7, "tool_parser": "hermes"}, "chunks"),
        ({"id": 7, "tool_parser": "hermes", "chunks": [1]}, "chunks"),
    ],
)
def test_a_bad_line_gives_an_error_and_the_next_is_read(line: Any, word: str) -> None:
    good = {"id": 8, "tool_parser": "hermes", "chunks": ["a"]}
    bad, fine = parse(line, "\n", good)
    assert word in bad["error"]["message"]
    assert bad["id"] == (7 if isinstance(line, dict) else None)
    assert fine["content"] == "a"


@pytest.mark.parametrize("tools", [[{"function": 3}], [{}], [{"function": {"name": "f"}}]])
def test_parse_reads_calls_although_the_tools_are_invalid(tools: list[Any]) -> None:
    for name in TOOL_PARSERS:
        (found,) = parse({"id": 1, "tool_parser": name, "chunks": [CALL], "tools": tools})
        assert "error" not in found
