"""Text inside an argument's value that looks like a call stays text of that value."""

from __future__ import annotations

import random

import pytest

from .conftest import TOOL_PARSERS, read_chunks, tool, written

PARSERS = {parser.name: parser for parser in TOOL_PARSERS.values()}
TOOLS = [tool("f", a="string", b="string"), tool("g", b="string")]
INNER = {name: written(parser, "g", {"b": "x"}) for name, parser in PARSERS.items()}
CLOSES_VALUE = {
    # a section of raw characters cannot hold another one
    ("minicpm5", "minicpm5"),
    # the inner tags are the value's own, and the call around them is another format's
    *(("glm47", "hy_v3"), ("poolside_v1", "hy_v3")),
}
"""(format, format of the text in its value) where the value's own closing tags stand in it."""


def outer(name: str, inner: str) -> tuple[str, dict[str, str]]:
    arguments = {"a": f"see {inner} end", "b": "z"}
    return written(PARSERS[name], "f", arguments), arguments


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_whole_call_in_a_value(name: str) -> None:
    for other, inner in INNER.items():
        text, arguments = outer(name, inner)
        found = read_chunks([text], tool_parser=PARSERS[name], tools=TOOLS)
        if (name, other) in CLOSES_VALUE:
            assert [called for called, _ in found.calls] == ["f"]
        else:
            assert (found.whole_calls, found.content.strip()) == ([("f", arguments)], "")


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_cut_or_spoilt_call_with_a_call_in_its_value(name: str) -> None:
    """Wherever the outer call ends or goes wrong, the inner one is not called."""
    chance = random.Random(name)
    for inner in dict.fromkeys((INNER[name], *chance.sample(sorted(INNER.values()), 2))):
        text, _ = outer(name, inner)
        cuts = chance.sample(range(text.index("see"), len(text)), 4)
        spoils = chance.sample(range(text.rindex(" end"), len(text)), 4)
        for reply in [*(text[:at] for at in cuts), *(text[:at] + "%" + text[at:] for at in spoils)]:
            for chunks in ([reply], list(reply)):
                found = read_chunks(chunks, tool_parser=PARSERS[name], tools=TOOLS)
                assert "g" not in [called for called, _ in found.calls], reply


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "minicpm5",
            '<function name="f"><param name="a"><![CDATA[</param></function><function name="g">'
            '<param name="b">x</param></function>]]></param></function>',
        ),
        (
            "minicpm5",
            '<function name="f"><param name="a"> <![CDATA[<function name="g">]]]]>'
            "<![CDATA[>x]]>\n</param></function>",
        ),
    ],
)
def test_raw_characters(name: str, text: str) -> None:
    found = read_chunks(list(text), tool_parser=PARSERS[name], tools=[tool("f", a="string")])
    ((called, arguments),) = found.whole_calls
    assert called == "f"
    assert arguments["a"].startswith(("</param></function><function", '<function name="g">]]>x'))


@pytest.mark.parametrize(
    "text",
    [
        '<function name="f"><param name="a">see <function name="g"><param name="b">x</param>'
        "</function> end</param></function>",
        '<function name="f"><param name="a"><function name="g"></function>',
        '<function name="f"><param name="c"><![CDATA[<function name="g"></function>]]></param>'
        "</function>",
        '<function name="e"><param name="a"><![CDATA[<function name="g"><param name="b">x'
        "</param></function>]]></param></function>",
    ],
)
def test_an_element_that_is_no_call_is_text_as_a_whole(text: str) -> None:
    for chunks in ([text + " tail"], list(text + " tail")):
        found = read_chunks(chunks, tool_parser=PARSERS["minicpm5"], tools=TOOLS)
        assert (found.calls, found.content) == ((), text + " tail")


def test_a_call_of_no_tool_is_text_as_a_whole() -> None:
    inner = "<function=g><parameter=b>x</parameter></function>"
    text = f"<tool_call><function=e><parameter=a>{inner}</parameter></function></tool_call>"
    found = read_chunks(list(text), tool_parser=PARSERS["nemotron"], tools=TOOLS)
    assert (found.calls, found.content) == ((), text)


def test_json_that_is_no_call_holds_none() -> None:
    """An answer in JSON is an answer, whatever stands in it; so is JSON that breaks off."""
    call = '{"name": "g", "parameters": {"b": "x"}}'
    for text in (f'{{"plan": [{call}]}} so', f'{{"name": "f", "parameters": oops {call}}}'):
        for chunks in ([text], list(text)):
            found = read_chunks(chunks, tool_parser=PARSERS["llama3_json"], tools=TOOLS)
            assert (found.calls, found.content) == ((), text)
