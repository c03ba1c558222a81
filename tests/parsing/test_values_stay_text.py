"""Text inside an argument's value that looks like a call stays text of that value."""

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
def test_a_complete_call_inside_a_value_stays_text(name: str) -> None:
    for other, inner in INNER.items():
        text, arguments = outer(name, inner)
        found = read_chunks([text], tool_parser=PARSERS[name], tools=TOOLS)
        if (name, other) in CLOSES_VALUE:
            assert [called for called, _ in found.calls] == ["f"]
        else:
            assert (found.whole_calls, found.content.strip()) == ([("f", arguments)], "")


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_call_inside_the_value_of_a_broken_call_is_never_called(name: str) -> None:
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


TAGGED = [
    name
    for name in sorted(PARSERS)
    if (tagged := PARSERS[name].call_grammar().tagged) and tagged.value_after.strip()[:2] == "</"
]
FILES = [tool("write", path="string", content="string"), *TOOLS]


def tags(name: str) -> tuple[str, str, str]:
    """The tags that end a value, its call and its block."""
    grammar = PARSERS[name].call_grammar()
    assert grammar.tagged is not None
    call, *rest = grammar.after.split()
    return grammar.tagged.value_after.strip(), call, "".join(rest) or grammar.close


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("first", ["path", "content"])
def test_closing_tags_inside_a_value_do_not_end_the_value(name: str, first: str) -> None:
    """A value with the tags that end values, calls and blocks is whole."""
    value, call, block = tags(name)
    pair = written(PARSERS[name], "write", {"z": "1"}).split(call)[0].partition("write")[2]
    pair = pair.partition(">")[2] if pair[:1] in '">' else pair
    for content in (
        f"x {value} y",
        f"x {value}\n{call} y",
        f"x {value}\n{call}\n{block} y {value}{call}{block} z",
        f"x {value}\n{call}\n{block} and {INNER[name]} y",
        f"one\n{pair.strip()}",
        f"one\n{pair.strip()}\n{pair.replace('z', 'y').strip()}\n",
        f"one\n{pair.replace('z', 'path').strip()}\n{pair.replace('z', 'content').strip()}",
        f"x {call} y {block}",
    ):
        arguments = {"path": "a.txt", "content": content}
        arguments = {key: arguments[key] for key in (first, *arguments)}
        text = written(PARSERS[name], "write", arguments)
        for chunks in ([text], list(text)):
            found = read_chunks(chunks, tool_parser=PARSERS[name], tools=FILES)
            assert (found.whole_calls, found.content) == ([("write", arguments)], ""), content


@pytest.mark.parametrize("name", TAGGED)
def test_a_doubled_closing_tag_closes_a_value_once(name: str) -> None:
    """Where the first tag may be text of the value, there is no call."""
    value, *_ = tags(name)
    arguments = {"path": "a.txt", "content": "b"}
    text = written(PARSERS[name], "write", arguments)
    for twice in (f"{value}\n{value}", f"{value}\n\n{value}\n{value}"):
        for reply in (text.replace(value, twice), text.replace(value, twice, 1)):
            for chunks in ([reply], list(reply)):
                found = read_chunks(chunks, tool_parser=PARSERS[name], tools=FILES)
                assert found.whole_calls == [("write", arguments)], reply
    for ends in ({"content": f"closed by {value}"}, {"content": f"closed by {value}", "path": "a"}):
        reply = written(PARSERS[name], "write", ends)
        found = read_chunks(list(reply), tool_parser=PARSERS[name], tools=FILES)
        assert found.whole_calls in ([], [("write", ends)])


@pytest.mark.parametrize("name", TAGGED)
def test_the_second_value_of_a_repeated_parameter_counts(name: str) -> None:
    """As in other servers. Where it stands in another value's text, it is text."""
    text = written(PARSERS[name], "write", {"path": "a.txt", "content": "b"})
    found = read_chunks(list(text.replace("content", "path")), tool_parser=PARSERS[name])
    if PARSERS[name].name == "minicpm5":
        assert found.whole_calls == []
        return
    assert found.whole_calls == [("write", {"path": "b"})]
    form = PARSERS[name].call_grammar().tagged
    assert form is not None
    opener = f"{form.key_before}path{form.text_key_after or form.key_after}"
    end = form.value_after.strip()
    quoted = {"path": "a.txt", "content": f"x {end}\n{opener}a.txt{end} y"}
    reply = written(PARSERS[name], "write", quoted)
    assert read_chunks(list(reply), tool_parser=PARSERS[name], tools=FILES).whole_calls in (
        [],
        [("write", quoted)],
    )


@pytest.mark.parametrize("name", TAGGED)
def test_text_and_calls_after_a_call_block_are_read(name: str) -> None:
    *_, block = tags(name)
    arguments = {"path": "a.txt", "content": "b"}
    text = written(PARSERS[name], "write", arguments)
    for tail, more in (
        ("\nAfter.", []),
        (f" closed by {block}, as it must be", []),
        (f"\nDone. {INNER[name]} And more.", [("g", {"b": "x"})]),
    ):
        for chunks in ([text + tail], list(text + tail)):
            found = read_chunks(chunks, tool_parser=PARSERS[name], tools=FILES)
            assert found.whole_calls == [("write", arguments), *more], tail


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
def test_cdata_sections_and_escapes_in_a_value_stay_text(name: str, text: str) -> None:
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
def test_an_invalid_call_element_becomes_text_with_its_inner_call(text: str) -> None:
    for chunks in ([text + " tail"], list(text + " tail")):
        found = read_chunks(chunks, tool_parser=PARSERS["minicpm5"], tools=TOOLS)
        assert (found.calls, found.content) == ((), text + " tail")


def test_a_call_of_an_unknown_tool_becomes_text_with_its_inner_call() -> None:
    inner = "<function=g><parameter=b>x</parameter></function>"
    text = f"<tool_call><function=e><parameter=a>{inner}</parameter></function></tool_call>"
    found = read_chunks(list(text), tool_parser=PARSERS["nemotron"], tools=TOOLS)
    assert (found.calls, found.content) == ((), text)


def test_a_call_inside_a_json_answer_is_not_called() -> None:
    """An answer in JSON is an answer, whatever stands in it; so is JSON that breaks off."""
    call = '{"name": "g", "parameters": {"b": "x"}}'
    for text in (f'{{"plan": [{call}]}} so', f'{{"name": "f", "parameters": oops {call}}}'):
        for chunks in ([text], list(text)):
            found = read_chunks(chunks, tool_parser=PARSERS["llama3_json"], tools=TOOLS)
            assert (found.calls, found.content) == ((), text)
