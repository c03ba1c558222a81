"""MiniCPM 5: one well-formed XML element per call, with declared parameters only."""

import html
import json
import re

from mlx_provider import CallGrammar, TaggedArguments, ToolParser
from mlx_provider.records import Emit, NotACall, Reading, ShowText, TextReader, Tools, claim

from .json_text import read_json_before, read_json_text
from .values import Arguments, functions, properties

OPEN, CLOSE = "<function name=", "</function>"
CDATA, CDATA_END = "<![CDATA[", "]]>"
PARAMETERS = ("<param name", "<parameter name")
_TOKEN = re.compile("|".join(map(re.escape, (OPEN, CLOSE, CDATA, CDATA_END))))
_HEADER = re.compile(r"""\s*=?\s*(?:"([^"<>]+)"|'([^'<>]+)'|([^\s"'<>]+))\s*""")


def scan(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read `<function name="NAME"><param name="KEY">value</param></function>`."""
    start = reader.mark()
    yield from reader.expect(OPEN)
    yield from reader.space()
    quoted = (yield from reader.peek()) in ('"', "'")
    # a fault makes the whole element text; in its header, only if a quote shows that it is a call
    name = "" if quoted else (yield from _header(reader))
    yield from claim(_call(reader, name, tools), _show_element(start))


def _header(reader: TextReader) -> Reading[str]:
    """Read the rest of an opening tag. Returns the name in it."""
    found = _HEADER.fullmatch((yield from reader.until(">", "<")))
    if found is None or not (yield from reader.accept(">")):
        raise NotACall("a tag has one name")
    return next(name for name in found.groups() if name is not None).strip()


def _call(reader: TextReader, name: str, tools: Tools) -> Reading[None]:
    """Read the name, if it is empty, then parameters or one JSON object, then the end."""
    name, known = name or (yield from _header(reader)), functions(tools)
    if not name or (known and name not in known):
        raise NotACall("no such tool")
    arguments = Arguments(reader, tools, name, "json", lines=False)
    yield from reader.space()
    body = (yield from read_json_text(reader)) if (yield from reader.at("{")) else "{}"
    try:
        given = json.loads(body)
    except ValueError as error:  # a number of more than 4,300 digits
        raise NotACall(str(error)) from None
    for key, item in given.items():
        _open(arguments, key)
        arguments.piece(item if isinstance(item, str) else json.dumps(item, ensure_ascii=False))
        arguments.close()
    yield from reader.space()
    while (yield from reader.accept(*PARAMETERS)):
        _open(arguments, (yield from _header(reader)))
        yield from _value(reader, arguments)
        arguments.close()
        yield from reader.space()
    yield from reader.expect(CLOSE)
    arguments.end()


def _open(arguments: Arguments, key: str) -> None:
    """Begin a parameter. Raises `NotACall` if it is not declared, or repeated."""
    if functions(arguments.tools) and key not in properties(arguments.tools, arguments.name):
        raise NotACall("no such parameter")
    if key in arguments.keys:
        raise NotACall("twice the same parameter")
    arguments.open(key)


def _value(reader: TextReader, arguments: Arguments) -> Reading[None]:
    """Read a value and its closing tag: text without white space around it, and CDATA sections."""
    while True:
        arguments.piece(html.unescape((yield from reader.until("<")).strip()))
        if (yield from reader.accept("</param>", "</parameter>")):
            return
        yield from reader.expect(CDATA)
        if not arguments.is_text:
            arguments.piece((yield from read_json_before(reader, CDATA_END)))
        arguments.piece((yield from reader.until(CDATA_END)))
        reader.skip(len(CDATA_END))


def _show_element(start: int) -> ShowText:
    """Text up to the end of the element at `start`. Tags in a CDATA section do not count."""

    def show(reader: TextReader, emit: Emit) -> Reading[None]:
        text, depth, raw = reader.between(start, reader.position), 0, False
        while text:
            for token in _TOKEN.findall(text):
                if raw or token == CDATA:
                    raw = token != CDATA_END
                else:
                    depth += {OPEN: 1, CLOSE: -1}.get(token, 0)
            if depth <= 0:
                return
            text = yield from reader.pass_until((OPEN, CLOSE, CDATA, CDATA_END), emit)
            emit(reader.skip(len(text)))

    return show


PARSERS = (
    ToolParser(
        name="minicpm5",
        start=OPEN,
        end=CLOSE,
        scan=scan,
        atomic=True,
        markers=(*PARAMETERS, "</param>", "</parameter>", CDATA),
        detect=lambda template: "<function name=" in template and "<param name=" in template,
        aliases=("minicpm",),
        rank=3,
        grammar=CallGrammar(
            '<function name="{name}">',
            "</function>",
            tagged=TaggedArguments(
                '<param name="', '"><![CDATA[', "]]></param>", untyped="json", barred=(CDATA_END,)
            ),
        ),
    ),
)
