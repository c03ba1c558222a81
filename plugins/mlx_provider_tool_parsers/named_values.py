"""Formats in which the tool's name is a key or part of a tag: Apertus, Functionary 3.1."""

from __future__ import annotations

import json

from mlx_provider import CallGrammar, ToolParser
from mlx_provider.records import NotACall, Reading, TextReader, Tools, claimed, through

from .blocks import JsonBlock
from .json_text import read_call, read_whole
from .lookahead import accept_spaced
from .tagged import TagFormat

PREFIX, SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"


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
    """`<function=NAME>{...}</function>`, or a list."""
    form = _LIST if (yield from reader.at("[")) else _TAGS
    yield from form.scan(reader, tools)


PARSERS = (
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
        name="functionary_v3_1",
        start="<function=",
        first=("[",),
        end="</function>",
        scan=scan_functionary,
        detect=lambda template: "<function=" in template and "<|python_tag|>" in template,
        rank=3,
        grammar=CallGrammar("<function={name}>", "</function>"),
    ),
)
