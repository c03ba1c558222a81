"""Functionary 3.2: each message of a reply begins with its recipient, `>>>NAME` and a line end."""

from __future__ import annotations

import re

from mlx_provider import CallGrammar, MessageGrammar, ReasoningParser, ToolParser
from mlx_provider.records import NotACall, Reading, TextReader, Tools, read_block, scan_block

from .json_text import read_call
from .schema import accepts, functions

OPENER, USER = ">>>", "all"
_NAME = re.compile(r"[\w.:/-]*")


def _speaks(template: str) -> bool:
    return ">>>all" in template or ">>>${" in template


def read_functionary(reader: TextReader, tools: Tools | None) -> Reading[None]:
    """A whole reply: `all\\ntext>>>NAME\\n{...}`. The prompt has begun the first header."""
    yield from _message(reader, tools)
    while (yield from reader.pass_until((OPENER,), reader.content)):
        yield from _message(reader, tools)


def _message(reader: TextReader, tools: Tools | None) -> Reading[None]:
    """A header, and a call if it names a tool. Other text does not change."""
    mark = reader.mark()
    opener = yield from reader.accept(OPENER)
    name = yield from reader.run(_NAME)
    ended = yield from reader.accept("\n")
    if ended and name == USER:
        reader.release()
    elif ended and name and tools is not None and accepts(tools)(name):
        reader.rewind(mark)
        yield from _call(reader, f"{opener}{name}\n", tools or ())
    elif (
        (opener or name)
        and not (ended or (yield from reader.peek()))
        and _begins_header(name, tools)
    ):
        reader.release()  # the reply is cut inside it
    else:
        reader.rewind(mark)
        reader.content(reader.skip(len(opener)))


def _begins_header(name: str, tools: Tools | None) -> bool:
    return any(recipient.startswith(name) for recipient in (USER, *functions(tools or ())))


def _call(reader: TextReader, header: str, tools: Tools) -> Reading[None]:
    scan = scan_block(CALLS, reader, tools)
    called = yield from read_block(reader, scan, CALLS, header, reader.content, tools)
    reader.forget_marks()
    if called:
        space = yield from reader.space()
        if (yield from reader.peek()) and not (yield from reader.at(OPENER)):
            reader.content(space)


def scan_call(reader: TextReader, tools: Tools) -> Reading[None]:
    """`>>>NAME` and JSON on the next line. The opener can be in the prompt."""
    yield from reader.accept(OPENER)
    name = yield from reader.run(_NAME)
    if not name:
        raise NotACall("a call has a name")
    yield from reader.expect("\n")
    yield from read_call(reader, name)


CALLS = ToolParser(
    name="functionary",
    start=OPENER,
    end="",
    scan=scan_call,
    whole=read_functionary,
    detect=_speaks,
    aliases=("meetkai",),
    rank=3,
    grammar=CallGrammar("{name}\n", "", between=OPENER),
)
PARSERS = (CALLS,)
REASONING_PARSERS = (
    ReasoningParser(
        name="functionary",
        start="",
        end="",
        whole=read_functionary,
        detect=_speaks,
        rank=3,
        grammar=MessageGrammar("", "", "", f"{USER}\n"),
    ),
)
"""Its headers; it has no thoughts."""
