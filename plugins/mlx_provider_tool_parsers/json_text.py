"""Reads calls as JSON objects, single or in a list, after a marker or at the start of an answer."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_provider import ToolParser
from mlx_provider.records import (
    Emit,
    JsonReader,
    NotACall,
    Reading,
    Rest,
    TextEnded,
    TextReader,
    Tools,
    claimed,
    read_json,
    through,
)

from .values import accepts


def ignore(text: str) -> None:
    """Drop a piece of text."""


_UNQUOTED = frozenset(" \t\r\n,:0123456789.+-eEtrufalsn")
"""Characters outside of strings and brackets in JSON."""


@dataclass
class Brackets:
    """Follows a text up to the bracket that closes its first one."""

    strict: bool = False
    """Also end at a character that JSON has only in strings."""
    quotes: str = '"'
    """Characters that begin a string."""
    brackets: str = "[]{}"
    depth: int = 0
    quote: str = ""
    escaped: bool = False
    ended: bool = False

    def take(self, text: str) -> int:
        for at, character in enumerate(text):
            if self.ended:
                return at
            self.follow(character)
        return len(text)

    def follow(self, character: str) -> None:
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


def read_balanced(start: int, *, strict: bool = False) -> Rest:
    """Text up to the bracket that closes the one at `start`, a position of the reader. `strict`:
    ends earlier if the text cannot be JSON."""

    def rest(reader: TextReader, emit: Emit) -> Reading[None]:
        brackets = Brackets(strict)
        brackets.take(reader.between(start, reader.position))
        while not brackets.ended:
            emit(reader.skip(brackets.take(reader.ahead())))
            if brackets.ended or not (yield from reader.more()):
                return

    return rest


def read_call(
    reader: TextReader, name: str, rest: Rest | None = None, call_id: str = ""
) -> Reading[None]:
    """Read the arguments, a JSON object that begins here. Raises `NotACall` with `rest`: by
    default, the text up to the closing bracket of a malformed object is no call."""
    yield from reader.space()
    if not name:
        raise NotACall("a call has a name")
    first = yield from reader.peek()
    if first and first in '"[':
        yield from claimed(read_json(reader, ignore), rest)
        raise NotACall("arguments are a JSON object", whole=True, rest=rest)
    if first != "{":
        raise NotACall("arguments are a JSON object")
    reader.call(name, call_id)
    start = reader.mark()
    yield from claimed(read_json(reader, reader.arguments), rest or read_balanced(start))
    reader.release()
    reader.end_call()


def read_whole(reader: TextReader) -> Reading[str]:
    parts: list[str] = []
    yield from read_json(reader, parts.append)
    return "".join(parts)


def pass_json(reader: TextReader, end: str) -> Reading[str]:
    """A JSON list, object or string, as written, if `end` follows it. Empty: nothing was read."""
    mark, text = reader.mark(), ""
    yield from reader.space()
    if (yield from reader.at("{", "[", '"')):
        try:
            yield from read_json(reader, ignore)
            yield from reader.space()
            if (yield from reader.at(end)):
                text = reader.between(mark, reader.position)
        except (NotACall, TextEnded):
            pass
    if text:
        reader.release()
    else:
        reader.rewind(mark)
    return text


def as_arguments(text: str) -> str:
    """As JSON text: a JSON string that contains an object becomes the object, and null `{}`."""
    value: Any = json.loads(text)
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except ValueError:
            return text
        return value if isinstance(inner, dict) else text
    return "{}" if value is None else text


CALL_KEYS = frozenset(
    {"name", "function", "tool_name", "arguments", "parameters", "args", "type", "id", "index"}
)


@dataclass(kw_only=True)
class CallObject(JsonReader):
    """`{"name": ..., "arguments": {...}}`, keys in any order."""

    emit: Emit = ignore
    arguments_needed: bool = False
    known: Callable[[str], bool] = lambda name: True
    ids: bool = False
    """Whether calls have ids. An id can follow the arguments, which are held back until then."""
    name: str = ""
    call_id: str = ""
    begun: bool = False
    early: str = ""
    """Arguments before the name."""
    held: list[str] = field(default_factory=list)
    """Pieces of arguments before the id."""

    @property
    def has_arguments(self) -> bool:
        return bool(self.begun or self.held or self.early)

    def read(self) -> Reading[None]:
        if not (yield from self.reader.at("{")):
            yield from self.reader.expect("{")
        try:
            yield from self.items("{")
        except (NotACall, TextEnded):
            if self.held:
                self.show_held()
            raise
        self.end()

    def key(self, before: str) -> Reading[str]:
        if (yield from self.reader.peek()) != '"':
            yield from self.reader.char()
            raise NotACall("a key must be a string")
        key = json.loads((yield from read_whole(self.reader)))
        if self.arguments_needed and key not in CALL_KEYS:
            raise NotACall("other JSON")
        yield from self.space()
        yield from self.reader.expect(":")
        yield from self.space()
        return str(key)

    def value(self, key: str = "") -> Reading[None]:
        first = yield from self.reader.peek()
        if key in ("name", "function", "tool_name") and first == '"' and not self.name:
            self.name = json.loads((yield from read_whole(self.reader)))
            if not self.name or not self.known(self.name):
                raise NotACall("no such tool")
        elif key == "name" and not self.name and first:
            raise NotACall("a name is a string")
        elif key == "function" and first == "{":
            yield from self.items("{")
        elif key in ("arguments", "parameters", "args") and not self.has_arguments:
            yield from self.arguments(first)
        elif key == "id" and self.ids and first == '"':
            self.call_id = json.loads((yield from read_whole(self.reader)))
        else:
            yield from read_json(self.reader, ignore)

    def arguments(self, first: str) -> Reading[None]:
        waits = self.ids and not self.call_id
        if self.name and first == "{":
            if not waits:
                self.begin()
            yield from read_json(self.reader, self.held.append if waits else self.reader.arguments)
            return
        text = as_arguments((yield from read_whole(self.reader)))
        if not self.name:
            self.early = text
        elif waits:
            self.held.append(text)
        else:
            self.begin()
            self.reader.arguments(text)

    def begin(self) -> None:
        self.begun = True
        self.reader.call(self.name, self.call_id)

    def show_held(self) -> None:
        self.begin()
        self.reader.arguments("".join(self.held))

    def end(self) -> None:
        if self.held:
            self.show_held()
        if not self.name or (self.arguments_needed and not self.has_arguments):
            raise NotACall("a call has a name and arguments")
        if not self.begun:
            self.begin()
            self.reader.arguments(self.early or "{}")
        self.reader.end_call()


_CLOSERS = re.compile(r"[\s}\]]*")
_BEGUN = re.compile(r'[\[\s]*\{\s*"([^"]*)')
"""An object with a key: from here on there are values, whose text must stay text."""


@dataclass(frozen=True)
class JsonBlock:
    """One call, a list of calls or several of either, between markers or bare."""

    openers: tuple[str, ...]
    """If one ends with `[` or `{`, this character belongs to the JSON."""
    end: str = ""
    known: Callable[[str], bool] | None = None
    """Whether a call between markers can have this name; `None`: all names."""
    fence: str = ""
    """Another marker that may stand in the place of `end`."""
    ids: bool = False
    """See `CallObject`."""

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        opener = yield from reader.at(*self.openers)
        body = opener.rstrip("[{")
        bare = not body or opener.startswith("```")
        reader.skip(len(body))
        yield from reader.space()
        yield from self.between(reader, accepts(tools) if bare else None)

    def between(
        self, reader: TextReader, bare: Callable[[str], bool] | None = None
    ) -> Reading[None]:
        """Read the text after the marker. `bare`: there was no marker, so the tools must be
        known."""
        before = reader.calls
        known = bare or self.known or (lambda name: True)
        yield from self.values(reader, known, bare is not None)
        if reader.calls == before:
            raise NotACall("an empty list")
        yield from self.close(reader)

    def values(self, reader: TextReader, known: Callable[[str], bool], bare: bool) -> Reading[None]:
        while True:
            yield from self.value(reader, known, bare)
            mark = reader.mark()
            yield from reader.space()
            if (yield from reader.accept(",", ";")):
                yield from reader.space()
            repeated = yield from reader.at("{", "[{")
            if not repeated or (bare and repeated != "{"):
                reader.rewind(mark)
                return
            reader.release()

    def value(self, reader: TextReader, known: Callable[[str], bool], bare: bool) -> Reading[None]:
        start = reader.mark()
        try:
            if (yield from reader.accept("[")):
                yield from self.items(reader, known, bare)
            else:
                yield from self.object(reader, known, bare)
        except NotACall as failure:
            begun = _BEGUN.match(reader.between(start, reader.position))
            if not begun:
                raise
            rest = self.rest(start, bare, is_call=begun[1] in CALL_KEYS)
            raise NotACall(str(failure), whole=True, rest=rest) from failure
        reader.release()

    def object(self, reader: TextReader, known: Callable[[str], bool], bare: bool) -> Reading[None]:
        return CallObject(reader, arguments_needed=bare, known=known, ids=self.ids).read()

    def rest(self, start: int, bare: bool, is_call: bool) -> Rest:
        """The rest of a malformed call. Other JSON ends at the first invalid character. `is_call`:
        whether its first key is one of a call."""
        if self.end and not bare:
            return through(self.end)
        return read_balanced(start, strict=not is_call)

    def items(self, reader: TextReader, known: Callable[[str], bool], bare: bool) -> Reading[None]:
        yield from reader.space()
        while not (yield from reader.accept("]")):
            yield from self.object(reader, known, bare)
            yield from reader.space()
            if (yield from reader.accept(",")):
                yield from reader.space()
            elif not (yield from reader.at("]")):
                return

    def close(self, reader: TextReader) -> Reading[None]:
        ends = tuple(x for x in (self.end, self.fence) if x)
        if not ends:
            return
        mark = reader.mark()
        yield from reader.run(_CLOSERS)
        if (yield from reader.accept(*ends)):
            reader.release()
        else:
            reader.rewind(mark)


def entry(
    name: str, marks: tuple[str, ...] = (), aliases: str = "", rank: int = 2
) -> dict[str, Any]:
    """Fields of a parser. `marks`: texts in each chat template of its format; empty: it is chosen
    by its name."""

    def detect(template: str) -> bool:
        return all(mark in template for mark in marks)

    found = {"name": name, "aliases": tuple(aliases.split()), "rank": rank}
    return found | ({"detect": detect} if marks else {})


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
