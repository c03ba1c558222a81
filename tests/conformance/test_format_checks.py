"""Each check of a format finds the format that breaks its promise, and names the promise."""

from collections.abc import Callable

import pytest

from mlx_provider.testing.conformance import Nonconformity, parsers

HEAD = """
import json, re
from mlx_provider import CallGrammar, TaggedArguments, ToolCall, ToolParser, hookimpl
from mlx_provider.records import NotACall, TextEnded

mlx_provider_api = 1

def parse(text, tools):
    call = json.loads(text)
    return [ToolCall(call["name"], json.dumps(call["arguments"]))]

def plain(reader, tools):
    yield from reader.expect("<c>")
    text = yield from reader.until("</c>")
    yield from reader.expect("</c>")
    for call in parse(text, tools):
        reader.call(call.name)
        reader.arguments(call.arguments)
        reader.end_call()

@hookimpl
def mlx_tool_parsers():
    yield TOY

"""
GOOD = 'TOY = ToolParser("toy", "<c>", "</c>", parse)'
BY_CHUNK = """
def scan(reader, tools):
    reading, waits = plain(reader, tools), 0
    for _ in reading:
        waits += 1
        yield
        if waits > 6:
            raise NotACall("it took too long")

TOY = ToolParser("toy", "<c>", "</c>", scan=scan)
"""
WIDE = """
def parse(text, tools):
    name, _, rest = text.partition("(")
    pairs = [each.partition("=") for each in rest.rstrip(")").split(";") if each]
    return [ToolCall(name, json.dumps({key: value for key, _, value in pairs}))]

TOY = ToolParser("toy", "<c>", "</c>", parse, grammar=CallGrammar(
    "<c>{name}(", ")</c>", tagged=TaggedArguments("", "=", ";")))
"""
OTHER_WORDS = """
BEFORE = '<c>{"tool": "{name}", "arguments": '
TOY = ToolParser("toy", "<c>", "</c>", parse, grammar=CallGrammar(BEFORE, "}</c>"))
"""
CUT_FAILS = """
def scan(reader, tools):
    try:
        yield from plain(reader, tools)
    except TextEnded:
        raise IndexError("no more text")

TOY = ToolParser("toy", "<c>", "</c>", scan=scan)
"""
CUT_LOSES = """
def scan(reader, tools):
    try:
        yield from plain(reader, tools)
    except TextEnded:
        return

TOY = ToolParser("toy", "<c>", "</c>", scan=scan)
"""
ENDLESS = """
def endless(text, tools):
    while text.startswith("["):
        pass
    return parse(text, tools)

TOY = ToolParser("toy", "<c>", "</c>", endless)
"""
DEEP = """
def scan(reader, tools):
    yield from reader.expect("<c>")
    yield from nested(reader)

def nested(reader):
    if (yield from reader.accept("[")):
        yield from nested(reader)
    raise NotACall("no call")

TOY = ToolParser("toy", "<c>", "</c>", scan=scan)
"""
EATS_TEXT = """
def whole(reader, tools):
    text = yield from reader.rest()
    reader.content(text.replace("<", ""))

TOY = ToolParser("toy", "<c>", "</c>", whole=whole)
"""
LOWER = """
def parse(text, tools):
    call = json.loads(text)
    return [ToolCall(call["name"].lower(), json.dumps(call["arguments"]))]

TOY = ToolParser("toy", "<c>", "</c>", parse)
"""
GREEDY = GOOD.replace("parse)", "parse, detect=lambda template: True)")

TOYS = {
    "good": (GOOD, set()),
    "by chunk": (BY_CHUNK, {"any chunking"}),
    "a grammar wider than its parser": (WIDE, {"grammar to parser", "parser to grammar"}),
    "other words": (OTHER_WORDS, {"grammar to parser", "parser to grammar", "odd names"}),
    "cut fails": (CUT_FAILS, {"cut replies"}),
    "cut loses": (CUT_LOSES, {"cut replies"}),
    "nests": (DEEP, {"bombs"}),
    "never ends": (ENDLESS, {"bombs"}),
    "eats text": (EATS_TEXT, {"plain text"}),
    "lower": (LOWER, {"odd names"}),
    "claims any template": (GREEDY, {"recognition"}),
}


@pytest.mark.parametrize("toy", TOYS)
def test_the_check_of_each_broken_promise_of_a_parser_fails(
    install_plugin: Callable[..., str],
    failures: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    toy: str,
) -> None:
    source, broken = TOYS[toy]
    if "bombs" in broken:  # else the product's own bound: nobody waits for it
        monkeypatch.setattr(parsers, "WORK", 0.3)
    found = failures(install_plugin("toy", HEAD + source), only=tuple(broken))
    assert set(found) == broken, found


def test_the_cut_thoughts_check_finds_a_reasoning_parser_that_loses_text(
    install_plugin: Callable[..., str], failures: Callable[..., dict[str, str]]
) -> None:
    source = """
from mlx_provider import ReasoningParser, hookimpl

def whole(reader, tools):
    text = yield from reader.until("</t>")
    reader.reasoning(text)

@hookimpl
def mlx_reasoning_parsers():
    yield ReasoningParser("toy", "<t>", "</t>", whole=whole)
    yield ReasoningParser("twin", "<t>", "</t>")
    yield ReasoningParser("dumb", "<t>", "</t>", detect=lambda template: 1 / 0)
"""
    name = install_plugin("thinker", source)
    assert set(failures(name, only=("toy  cut thoughts",))) == {"cut thoughts"}
    assert failures(name, only=("twin  cut thoughts", "twin  thoughts")) == {}
    assert set(failures(name, only=("recognition",))) == {"recognition"}


def test_a_plugin_that_does_not_load_fails_by_name(
    install_plugin: Callable[..., str], failures: Callable[..., dict[str, str]]
) -> None:
    found = failures(install_plugin("broken", "import nowhere_to_be_found"))
    assert set(found) == {"loads"}
    assert "ModuleNotFoundError: No module named 'nowhere_to_be_found'" in found["loads"]


def test_endless_work_of_a_checked_plugin_is_stopped() -> None:
    def loop() -> None:
        while True:
            pass

    with (
        pytest.raises(Nonconformity, match="the loop was not done"),
        parsers.time_limit(0.05, "the loop"),
    ):
        loop()
