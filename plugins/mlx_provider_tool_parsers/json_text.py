"""Calls as JSON objects, single or in a list, after a marker or at the start of an answer. A format
uses `json_block` if its calls are only JSON objects, `JsonBlock` if it has other forms, too, and
`read_call` if the name stands before the object."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_provider import ToolParser
from mlx_provider.records import (
    Emit,
    JsonReader,
    NotACall,
    Reading,
    ShowText,
    TextEnded,
    TextReader,
    Tools,
    claim,
    read_json,
    show_through,
)

from .values import accepts, refuse_constant


def identity(
    name: str, marks: tuple[str, ...] = (), *, aliases: str = "", rank: int = 2
) -> dict[str, Any]:
    """Fields of a `ToolParser` by which it is chosen. `marks`: texts that all chat templates of the
    format contain; empty: no `detect`. `aliases`: names with spaces between them."""
    fields: dict[str, Any] = {"name": name, "aliases": tuple(aliases.split()), "rank": rank}
    if marks:
        fields["detect"] = lambda template: all(mark in template for mark in marks)
    return fields


def json_block(
    openers: tuple[str, ...],
    end: str,
    *,
    first: tuple[str, ...] = (),
    fence: str = "",
    **fields: Any,
) -> ToolParser:
    """JSON calls between one of `openers` and `end`. `first`: openers that are valid only at the
    start of an answer; `fields`: of `ToolParser`."""
    block = JsonBlock(openers=(*openers, *first), end=end, fence=fence)
    return ToolParser(
        start=openers[0], starts=openers[1:], first=first, end=end, scan=block.scan, **fields
    )


def ignore(text: str) -> None:
    """An `Emit` that drops the text."""


CALL_KEYS = frozenset(
    {"name", "function", "tool_name", "arguments", "parameters", "args", "type", "id", "index"}
)
_CLOSERS = re.compile(r"[\s}\]]*")
_FIRST_KEY = re.compile(r'[\[\s]*\{\s*"([^"]*)')
"""The first key of an object, perhaps cut. Once it has been read, a failure makes everything text,
because text in a value may look like a call."""


@dataclass(frozen=True)
class JsonBlock:
    """One call, a list of calls or several of either, between markers or bare."""

    openers: tuple[str, ...]
    """If one ends with `[` or `{`, this character belongs to the JSON."""
    end: str = ""
    fence: str = ""
    """Another marker that may stand in the place of `end`."""
    known: Callable[[str], bool] = bool
    """Whether a call can have this name; `bool`: any name."""
    ids: bool = False
    """Whether calls have ids. An id can follow the arguments, which are held back until then."""
    bare: bool = False
    """After no marker: an object without arguments, or with unknown keys, is no call."""

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        """Read the marker, if there is one, and the calls after it."""
        opener = yield from reader.at(*self.openers)
        marker = opener.rstrip("[{")
        reader.skip(len(marker))
        yield from reader.space()
        bare = not marker or marker.startswith("```")
        block = replace(self, known=accepts(tools), bare=True) if bare else self
        yield from block.read_calls(reader)

    def read_calls(self, reader: TextReader) -> Reading[None]:
        """Read calls and `end`. Raises `NotACall`, also if there are none."""
        before = reader.calls_begun
        yield from self._read_values(reader)
        if reader.calls_begun == before:
            raise NotACall("an empty list")
        if ends := tuple(filter(None, (self.end, self.fence))):
            mark = reader.mark()
            yield from reader.run(_CLOSERS)
            closed = yield from reader.accept(*ends)
            reader.rewind(reader.position if closed else mark)  # the former only drops the mark

    def _read_values(self, reader: TextReader) -> Reading[None]:
        while True:
            yield from self._read_value(reader)
            mark = reader.mark()
            yield from reader.space()
            if (yield from reader.accept(",", ";")):
                yield from reader.space()
            repeated = yield from reader.at("{", "[{")
            if not repeated or (self.bare and repeated != "{"):
                reader.rewind(mark)
                return
            reader.drop_mark()

    def _read_value(self, reader: TextReader) -> Reading[None]:
        start = reader.mark()
        try:
            if (yield from reader.accept("[")):
                yield from self._read_list(reader)
            else:
                yield from CallObject(reader, block=self).read()
        except NotACall as failure:
            begun = _FIRST_KEY.match(reader.between(start, reader.position))
            if not begun:
                raise
            if self.end and not self.bare:
                then = show_through(self.end)
            else:  # other JSON ends at the first character that is invalid in JSON
                then = show_balanced(start, strict=begun[1] not in CALL_KEYS)
            raise NotACall(str(failure), whole=True, then=then) from failure
        reader.drop_mark()

    def _read_list(self, reader: TextReader) -> Reading[None]:
        yield from reader.space()
        while not (yield from reader.accept("]")):
            yield from CallObject(reader, block=self).read()
            yield from reader.space()
            if (yield from reader.accept(",")):
                yield from reader.space()
            elif not (yield from reader.at("]")):
                return  # `_read_values` goes on without a comma, and `read_calls` skips a `]`


@dataclass(kw_only=True)
class CallObject(JsonReader):
    """`{"name": ..., "arguments": {...}}`, keys in any order. Reports the call as early as it can,
    and then streams its arguments."""

    emit: Emit = ignore
    block: JsonBlock
    name: str = ""
    call_id: str = ""
    reported: bool = False
    arguments_before_name: str = ""
    arguments_before_id: list[str] = field(default_factory=list)  # in pieces

    @property
    def has_read_arguments(self) -> bool:
        return bool(self.reported or self.arguments_before_name or self.arguments_before_id)

    def read(self) -> Reading[None]:
        """Read the object and report its call. Raises `NotACall`."""
        if not (yield from self.reader.at("{")):  # `items` reads it; this raises if there is none
            yield from self.reader.expect("{")
        try:
            yield from self.items("{")
        finally:  # also after a fault: a format without ids has reported the call by then
            if self.arguments_before_id:
                self.report("".join(self.arguments_before_id))
        if not self.name or (self.block.bare and not self.has_read_arguments):
            raise NotACall("a call has a name and arguments")
        if not self.reported:
            self.report(self.arguments_before_name or "{}")
        self.reader.end_call()

    def report(self, arguments: str = "") -> None:
        """Report the call, and the `arguments` that were read before this was possible."""
        self.reported = True
        self.reader.call(self.name, self.call_id)
        self.reader.arguments(arguments)

    def key(self, before: str) -> Reading[str]:
        if (yield from self.reader.peek()) != '"':
            yield from self.reader.char()
            raise NotACall("a key must be a string")
        key = json.loads((yield from read_json_text(self.reader)))
        if self.block.bare and key not in CALL_KEYS:
            raise NotACall("other JSON")
        yield from self.space()
        yield from self.reader.expect(":")
        yield from self.space()
        return str(key)

    def value(self, key: str = "") -> Reading[None]:
        first = yield from self.reader.peek()
        if key in ("name", "function", "tool_name") and first == '"' and not self.name:
            self.name = json.loads((yield from read_json_text(self.reader)))
            if not self.name or not self.block.known(self.name):
                raise NotACall("no such tool")
        elif key == "name" and not self.name and first:
            raise NotACall("a name is a string")
        elif key == "function" and first == "{":
            yield from self.items("{")
        elif key in ("arguments", "parameters", "args") and not self.has_read_arguments:
            yield from self.read_arguments(first)
        elif key == "id" and self.block.ids and first == '"':
            self.call_id = json.loads((yield from read_json_text(self.reader)))
        else:
            yield from read_json(self.reader, ignore)

    def read_arguments(self, first: str) -> Reading[None]:
        before_id = self.block.ids and not self.call_id
        if self.name and first == "{":
            if not before_id:
                self.report()
            emit = self.arguments_before_id.append if before_id else self.reader.arguments
            yield from read_json(self.reader, emit)
            return
        text = unwrap_arguments((yield from read_json_text(self.reader)))
        if not self.name:
            self.arguments_before_name = text
        elif before_id:
            self.arguments_before_id.append(text)
        else:
            self.report(text)


def unwrap_arguments(text: str) -> str:
    """JSON text of arguments: a string with a JSON object becomes the object, and `null` `{}`."""
    if text.startswith('"'):
        with suppress(ValueError, RecursionError):
            value: str = json.loads(text)
            if isinstance(json.loads(value, parse_constant=refuse_constant), dict):
                return value
    return "{}" if text == "null" else text


def read_call(
    reader: TextReader, name: str, then: ShowText | None = None, call_id: str = ""
) -> Reading[None]:
    """Read the arguments of the call `name`, a JSON object that begins here, and report the call.
    Raises `NotACall`. `then` shows the text after a fault, by default up to the closing bracket."""
    yield from reader.space()
    if not name:
        raise NotACall("a call has a name")
    first = yield from reader.peek()
    if first and first in '"[':
        yield from claim(read_json(reader, ignore), then)
        raise NotACall("arguments are a JSON object", whole=True, then=then)
    if first != "{":
        raise NotACall("arguments are a JSON object")
    reader.call(name, call_id)
    start = reader.mark()
    yield from claim(read_json(reader, reader.arguments), then or show_balanced(start))
    reader.drop_mark()
    reader.end_call()


def read_json_text(reader: TextReader) -> Reading[str]:
    """Read one JSON value and return its text. Raises `NotACall`."""
    parts: list[str] = []
    yield from read_json(reader, parts.append)
    return "".join(parts)


def read_json_before(reader: TextReader, end: str) -> Reading[str]:
    """Read a JSON list, object or string if `end` follows it. Returns its text as written; empty:
    there is none, and nothing was read."""
    mark, text = reader.mark(), ""
    yield from reader.space()
    if (yield from reader.at("{", "[", '"')):
        with suppress(NotACall, TextEnded):
            yield from read_json(reader, ignore)
            yield from reader.space()
            if (yield from reader.at(end)):
                text = reader.between(mark, reader.position)
    reader.rewind(mark + len(text))
    return text


_UNQUOTED = frozenset(" \t\r\n,:0123456789.+-eEtrufalsn")
"""Characters outside of strings and brackets in JSON (`true`, `false`, `null`, numbers)."""


@dataclass
class Brackets:
    """Finds the bracket that closes the first one of a text, which comes in pieces."""

    strict: bool = False
    """End also after a character that JSON has only inside strings."""
    quotes: str = '"'
    """Characters that begin a string."""
    brackets: str = "[]{}"  # Python calls add parentheses
    depth: int = 0
    quote: str = ""
    escaped: bool = False
    ended: bool = False

    def read(self, reader: TextReader, emit: Emit) -> Reading[bool]:
        """Read up to the end and emit the text. False: the reply ends before."""
        while not self.ended:
            emit(reader.skip(self.consume(reader.unread())))
            if not self.ended and not (yield from reader.more()):
                return False
        return True

    def consume(self, text: str) -> int:
        """Follow the next piece. Returns how many of its characters belong to the text."""
        for at, character in enumerate(text):
            if self.ended:
                return at
            self._step(character)
        return len(text)

    def _step(self, character: str) -> None:
        if self.quote:
            self.quote = "" if character == self.quote and not self.escaped else self.quote
            self.escaped = character == "\\" and not self.escaped
        elif character in self.quotes:
            self.quote = character
        elif character in self.brackets:
            self.depth += 1 if character in "([{" else -1
            self.ended = self.depth <= 0
        elif self.strict and character not in _UNQUOTED:
            self.ended = True


def show_balanced(start: int, *, strict: bool = False) -> ShowText:
    """Shows the text up to the bracket that closes the one at `start`, a position of the reader.
    `strict`: ends earlier if the text cannot be JSON."""

    def show(reader: TextReader, emit: Emit) -> Reading[None]:
        brackets = Brackets(strict)
        brackets.consume(reader.between(start, reader.position))
        yield from brackets.read(reader, emit)

    return show
