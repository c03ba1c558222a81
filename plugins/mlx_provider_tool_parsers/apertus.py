"""Apertus: a list of objects in which the tool's name is the key of its arguments."""

from __future__ import annotations

import json

from mlx_provider import CallGrammar, ToolParser
from mlx_provider.records import NotACall, Reading, TextReader, Tools, claimed, through

from .json_text import read_call, read_whole
from .lookahead import accept_spaced

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
)
