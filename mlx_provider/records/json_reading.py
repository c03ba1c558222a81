"""Reads JSON while it is written."""

from __future__ import annotations

import json
import re

from .reading import Emit, NotACall, Reading, TextReader

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null"} | {
    "True": "true",
    "False": "false",
    "None": "null",
}
_HEX = frozenset("0123456789abcdefABCDEF")

_DEEPEST = 100
"""Maximum levels of nesting."""


def read_json(reader: TextReader, emit: Emit) -> Reading[None]:
    """Read one JSON value and emit its text as it comes.

    The emitted text is valid JSON: raw line ends inside strings are escaped, a comma before a
    closing bracket is dropped, Python's literals become JSON's. Raises `NotACall` at the first
    character that cannot be JSON, and for more than 100 levels of nesting.
    """
    return _read_value(reader, emit, 0)


def _read_value(reader: TextReader, emit: Emit, depth: int) -> Reading[None]:
    if depth > _DEEPEST:
        raise NotACall("nested too deeply")
    first = yield from reader.peek()
    if first == '"':
        yield from _read_string(reader, emit)
    elif first in ("{", "["):
        yield from _read_items(reader, emit, "}" if first == "{" else "]", depth + 1)
    else:
        emit((yield from _read_scalar(reader)))


def _read_string(reader: TextReader, emit: Emit) -> Reading[None]:
    emit((yield from reader.char()))
    while True:
        emit((yield from reader.run_some(_PLAIN)))
        character = yield from reader.char()
        if character == '"':
            emit(character)
            return
        if character == "\\":
            emit((yield from _read_escape(reader)))
        elif character < " ":
            emit(json.dumps(character)[1:-1])
        else:
            emit(character)


def _read_escape(reader: TextReader) -> Reading[str]:
    escaped = yield from reader.char()
    if escaped == "u":
        digits = ""
        for _ in range(4):
            digits += yield from reader.char()
        if not _HEX.issuperset(digits):
            raise NotACall("bad escape")
        return "\\u" + digits
    if escaped in '"\\/bfnrt':
        return "\\" + escaped
    if escaped == "'":
        return "'"
    raise NotACall("bad escape")


def _read_scalar(reader: TextReader) -> Reading[str]:
    text = yield from reader.run(_SCALAR)
    if text in _LITERALS:
        return _LITERALS[text]
    if _NUMBER.fullmatch(text):
        return text
    if not text:
        yield from reader.char()
    raise NotACall("not a JSON value")


def _read_items(reader: TextReader, emit: Emit, end: str, depth: int) -> Reading[None]:
    """An object, which ends with a brace, or a list. `depth`: of its values."""
    emit((yield from reader.char()))
    space = yield from reader.space()
    if (yield from reader.accept(end)):
        emit(space + end)
        return
    while True:
        if end == "}":
            yield from _read_key(reader, emit, space)
        else:
            emit(space)
        yield from _read_value(reader, emit, depth)
        space = yield from reader.space()
        if (yield from reader.accept(",")):
            following = yield from reader.space()
            if not (yield from reader.at(end)):
                space = f"{space},{following}"
                continue
        yield from reader.expect(end)
        emit(space + end)
        return


def _read_key(reader: TextReader, emit: Emit, space: str) -> Reading[None]:
    """A key up to its value. `space`: the text before it."""
    if (yield from reader.peek()) != '"':
        yield from reader.char()
        raise NotACall("a key must be a string")
    emit(space)
    yield from _read_string(reader, emit)
    emit((yield from reader.space()))
    yield from reader.expect(":")
    emit(":" + (yield from reader.space()))
