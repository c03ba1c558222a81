"""Formats in which the tool's name is a key or a line: Apertus, Functionary."""

from __future__ import annotations

import json
import re

from mlx_provider import CallGrammar, ToolParser
from mlx_provider.records import NotACall, Reading, TextReader, Tools, claimed, through

from .blocks import JsonBlock
from .json_text import read_call, read_whole
from .lookahead import accept_spaced
from .tagged import TagFormat

PREFIX, SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"
_NAME = re.compile(r"[\w.:/-]*")


def scan_apertus(reader: TextReader, tools: Tools) -> Reading[None]:
    """`<|tools_prefix|>[{"NAME": {...}}, ...]<|tools_suffix|>`."""
    yield from reader.expect(PREFIX)
    yield from reader.space()
    yield from reader.expect("[")
    before = reader.calls
    while True:
        yield from reader.space()
        yield from reader.accept(",")
        yield from reader.space()
        if (yield from reader.accept("]")):
            break
        yield from claimed(_named_call(reader), through(SUFFIX))
    if reader.calls == before:
        raise NotACall("an empty list")
    yield from accept_spaced(reader, SUFFIX)


def _named_call(reader: TextReader) -> Reading[None]:
    """`{"NAME": {...}}`."""
    yield from reader.expect("{")
    yield from reader.space()
    if (yield from reader.at('"')) != '"':
        raise NotACall("a call is a name and its arguments")
    name = json.loads((yield from read_whole(reader)))
    yield from reader.space()
    yield from reader.expect(":")
    yield from read_call(reader, name)
    yield from reader.space()
    yield from reader.expect("}")


_TAGS = TagFormat(blocks=(), block_end="", bare=True)
_LIST = JsonBlock(openers=("[",))


def scan_functionary(reader: TextReader, tools: Tools) -> Reading[None]:
    """3.1: `<function=NAME>{...}</function>`; 3.2: `>>>NAME` and a line of JSON; or a list."""
    found = yield from reader.at("<function=", ">>>", "[")
    if found == "[":
        yield from _LIST.scan(reader, tools)
    elif found == "<function=":
        yield from _TAGS.scan(reader, tools)
    else:
        yield from reader.expect(">>>")
        name = yield from reader.run(_NAME)
        yield from reader.expect("\n")
        if name == "all":
            return
        if not name:
            raise NotACall("a call has a name")
        yield from read_call(reader, name)


def parsers() -> tuple[ToolParser, ...]:
    return (
        ToolParser(
            name="apertus",
            start=PREFIX,
            end=SUFFIX,
            scan=scan_apertus,
            detect=lambda template: PREFIX in template,
            aliases=("apertus2509",),
            rank=3,
            grammar=CallGrammar('{"{name}": ', "}", f"{PREFIX}[", f"]{SUFFIX}", between=", "),
        ),
        ToolParser(
            name="functionary",
            start="<function=",
            starts=(">>>",),
            first=("[",),
            end="</function>",
            scan=scan_functionary,
            detect=lambda template: ">>>all" in template or ">>>${" in template,
            aliases=("meetkai",),
            rank=3,
            grammar=CallGrammar("<function={name}>", "</function>"),
        ),
    )
