"""MiniCPM 5: one well-formed XML element per call, with declared parameters only."""

from __future__ import annotations

import html
import json
import re

from mlx_provider import CallGrammar, TaggedArguments, ToolCall, ToolParser
from mlx_provider.records import (
    Emit,
    NotACall,
    Reading,
    Rest,
    TextReader,
    Tools,
    claimed,
    report_call,
)

from .json_text import pass_json, read_whole
from .values import as_json, functions, is_text, listed, properties, types

OPEN, CLOSE = "<function name=", "</function>"
CDATA, CDATA_END = "<![CDATA[", "]]>"
PARAMETERS = ("<param name", "<parameter name")

_TOKEN = re.compile("|".join(map(re.escape, (OPEN, CLOSE, CDATA, CDATA_END))))
_HEADER = re.compile(r"""\s*=?\s*(?:"([^"<>]+)"|'([^'<>]+)'|([^\s"'<>]+))\s*""")


def scan(reader: TextReader, tools: Tools) -> Reading[None]:
    """`<function name="NAME"><param name="KEY">value</param></function>`."""
    start = reader.mark()
    yield from reader.expect(OPEN)
    yield from reader.space()
    quoted = (yield from reader.peek()) in ('"', "'")
    arguments: dict[str, str] = {}
    name = "" if quoted else (yield from _header(reader))
    name = yield from claimed(_call(reader, name, arguments, tools), _element(start))
    known = functions(tools)
    wrong = known and (name not in known or not properties(tools, name).keys() >= arguments.keys())
    if wrong:
        raise NotACall("no such tool, or no such parameter", whole=True)
    members = []
    for key, text in arguments.items():
        called = tools, name, key
        value = as_json(text, types(*called), "json", listed(*called))
        members.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
    report_call(reader, ToolCall(name, "{" + ", ".join(members) + "}"))


def _header(reader: TextReader) -> Reading[str]:
    found = _HEADER.fullmatch((yield from reader.until(">", "<")))
    if found is None or not (yield from reader.accept(">")):
        raise NotACall("a tag has one name")
    return next(name for name in found.groups() if name is not None).strip()


def _call(reader: TextReader, name: str, arguments: dict[str, str], tools: Tools) -> Reading[str]:
    """The name, if it was not read; then parameters, or one JSON object; then the end."""
    name = name or (yield from _header(reader))
    yield from reader.space()
    if (yield from reader.at("{")):
        value = json.loads((yield from read_whole(reader)))
        for key, item in value.items():
            text = isinstance(item, str)
            arguments[key] = item if text else json.dumps(item, ensure_ascii=False)
        yield from reader.space()
    while (yield from reader.accept(*PARAMETERS)):
        key = yield from _header(reader)
        if key in arguments:
            raise NotACall("twice the same parameter")
        text = is_text(types(tools, name, key), "json")
        arguments[key] = yield from _value(reader, text=text)
        yield from reader.space()
    yield from reader.expect(CLOSE)
    return name


def _value(reader: TextReader, *, text: bool) -> Reading[str]:
    """Text without surrounding white space, and literal CDATA sections. No tags."""
    plain: list[str] = []
    raw: list[str] = []
    while True:
        plain.append((yield from reader.until("<")))
        if (yield from reader.accept("</param>", "</parameter>")):
            break
        yield from reader.expect(CDATA)
        raw.append(html.unescape("".join(plain).strip()))
        plain = []
        if not text:
            raw.append((yield from pass_json(reader, CDATA_END)))
        raw.append((yield from reader.until(CDATA_END)))
        reader.skip(len(CDATA_END))
    return "".join(raw) + html.unescape("".join(plain).strip())


def _element(start: int) -> Rest:
    """Text up to the end of the element at `start`. Tags in a CDATA section do not count."""

    def rest(reader: TextReader, emit: Emit) -> Reading[None]:
        tokens = _TOKEN.findall(reader.between(start, reader.position))
        depth, raw = 0, False
        while tokens:
            for token in tokens:
                if raw or token == CDATA:
                    raw = token != CDATA_END
                else:
                    depth += {OPEN: 1, CLOSE: -1}.get(token, 0)
            if depth <= 0:
                return
            found = yield from reader.pass_until((OPEN, CLOSE, CDATA, CDATA_END), emit)
            emit(reader.skip(len(found)))
            tokens = [found] if found else []

    return rest


PARSERS = (
    ToolParser(
        name="minicpm5",
        start=OPEN,
        end=CLOSE,
        scan=scan,
        markers=(*PARAMETERS, "</param>", "</parameter>", CDATA),
        detect=lambda template: "<function name=" in template and "<param name=" in template,
        aliases=("minicpm",),
        rank=3,
        grammar=CallGrammar(
            '<function name="{name}">',
            "</function>",
            tagged=TaggedArguments(
                '<param name="',
                '"><![CDATA[',
                "]]></param>",
                untyped="json",
                barred=(CDATA_END,),
            ),
        ),
    ),
)
