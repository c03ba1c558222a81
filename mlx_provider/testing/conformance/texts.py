"""Replies with many markers and beginnings of markers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

PIECES = (
    '{"name": "f", "arguments": {"a": 1, "b": "x</tool_call>y"}}',
    *("f", "\n", " ", "plain", "é😀"),
    *("<function=f>", "<parameter=a>", "v", "</parameter>", "</function>", "[f(a='b')]", "[", "{"),
    *(
        "call:f{a:1}",
        "<arg_key>a</arg_key>",
        "<arg_value>1</arg_value>",
        "functions.f:0",
        "```json",
    ),
    *('<invoke name="f">', '<parameter name="a">', "</invoke>", '"', "\\", "STOP", "</", "<", "|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
)


def replies(markers: Sequence[str]) -> st.SearchStrategy[str]:
    return st.composite(_reply)(markers)


def _reply(draw: st.DrawFn, markers: Sequence[str]) -> str:
    parts = draw(st.lists(st.sampled_from([*PIECES, *markers, *markers]), max_size=14))
    text: str = "".join(parts)
    if text and draw(st.booleans()):
        gone = draw(st.integers(0, len(text) - 1))
        text = text[:gone] + text[gone + 1 :]
    return text


FRAGMENTS = (
    *("<", "</", "<tool", "<tool_cal", "<|", "<|tool", "[", "[TOOL", "[TOOL_CALLS", "{", "}", "]"),
    *(
        "<func",
        "<thin",
        "</thin",
        "call:",
        "functions.",
        "<｜",
        "a < b",
        "x[i] = {",
        "\n",
        " ",
        "so",
    ),
    *('{"value": 42}', "[1, 2]", "[see](http://x.test)", "if (a[0] < b) { return; }", "»", "😀"),
)
