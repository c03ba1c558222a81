"""A reply that ends inside a call shows nothing of the call's markup as content."""

import pytest

from .conftest import TOOL_PARSERS, read_chunks, tool, written

PARSERS = {parser.name: parser for parser in TOOL_PARSERS.values()}
TOOLS = [tool("get_weather", city="string")]
CALLS = {name: written(parser, "get_weather", {"city": "Oslo"}) for name, parser in PARSERS.items()}
BARE = {name for name, call in CALLS.items() if call[0] in "[{"}
"""Formats whose calls begin as any JSON text does."""


def first_cut(name: str) -> int:
    """Length of the shortest piece of a call that is not text."""
    call = CALLS[name]
    if name in BARE:
        return call.index("get_weather") + 1
    parser = PARSERS[name]
    openers = [each for each in (*parser.openers(), *parser.first) if call.startswith(each)]
    return min(map(len, openers), default=call.index("get_weather"))


def in_pieces(text: str) -> list[list[str]]:
    """At once; each third text also by character, which passes through all shorter ones."""
    return [[text], list(text)] if len(text) % 3 == 0 else [[text]]


@pytest.mark.parametrize("lead", ["", "Let me see. "], ids=["call", "text and call"])
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_cut_call_is_not_content(name: str, lead: str) -> None:
    if lead and (name in BARE or name == "harmony"):
        pytest.skip("a call of this format stands where the reply begins")
    call = CALLS[name]
    for end in range(first_cut(name), len(call)):
        text = lead + call[:end]
        for chunks in in_pieces(text):
            found = read_chunks(chunks, tool_parser=PARSERS[name], tools=TOOLS)
            assert found.content.strip() == lead.strip(), text
            assert [called for called, _ in found.calls] in ([], ["get_weather"])


@pytest.mark.parametrize("name", sorted(set(PARSERS) - BARE - {"harmony"}))
def test_a_cut_second_call_is_not_content(name: str) -> None:
    grammar = PARSERS[name].call_grammar()
    call = CALLS[name]
    one = call.removeprefix(grammar.open)
    one = one.removesuffix(grammar.close) if grammar.close else one
    if grammar.between is None:
        pytest.skip("one call a reply")
    whole = grammar.open + one + grammar.between
    for end in range(len(one)):
        text = whole + one[:end]
        for chunks in in_pieces(text):
            found = read_chunks(chunks, tool_parser=PARSERS[name], tools=TOOLS)
            assert found.content.strip() == "", text


def test_a_call_cut_inside_a_json_word_is_not_content() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": nul'
    found = read_chunks([text], tool_parser=PARSERS["hermes"], tools=TOOLS)
    assert (found.content, [called for called, _ in found.calls]) == ("", ["get_weather"])


@pytest.mark.parametrize("name", sorted(BARE))
@pytest.mark.parametrize(
    "text", ['{"name": "Ada Lov', '{"city": "Os', '[{"id": 1}, {"id', "[put(1, 2", "[1, 2"]
)
def test_a_cut_json_answer_is_content(name: str, text: str) -> None:
    assert read_chunks([text], tool_parser=PARSERS[name], tools=TOOLS).content == text


@pytest.mark.parametrize("name", sorted(set(PARSERS) - BARE))
def test_a_sentence_with_a_call_marker_is_content(name: str) -> None:
    for marker in PARSERS[name].openers():
        text = f"Calls begin with {marker} and then go on."
        assert read_chunks([text], tool_parser=PARSERS[name], tools=TOOLS).content == text
