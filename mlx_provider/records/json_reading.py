"""Reads the parameters in the definitions of tools (first part), and JSON while it is written."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import unquote

from .reading import Emit, NotACall, Reading, TextReader

_KINDS = {
    "string": ("str", "text", "char", "varchar", "enum"),
    "integer": ("int", "uint", "long", "short", "unsigned"),
    "number": ("num", "float", "double"),
    "boolean": ("bool",),
    "object": ("dict", "map"),
    "array": ("arr", "list", "tuple"),
}
_PREFIXES = {prefix: kind for kind, prefixes in _KINDS.items() for prefix in prefixes}
_IMPLIED = {
    "object": {"properties", "patternProperties", "additionalProperties"},
    "array": {"items", "prefixItems"},
}
_TYPES = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
_TYPES |= {type(None): "null"}
MOST_CHOICES = 10_000
"""Most values of a list of choices. A longer list counts as none."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null"}
_LITERALS |= {"True": "true", "False": "false", "None": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_DEEPEST = 100


def function_of(tool: Any) -> Mapping[str, Any]:
    """The definition of a tool's function, which may stand alone; empty: there is none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def listed_parameters(schema: Any) -> tuple[dict[str, Any], set[str]]:
    """Of a tool's `parameters`: the schemas by name, and the required names. Follows references."""
    properties: dict[str, Any] = {}
    required: set[str] = set()
    for part in _parts(schema):
        found, needed = part.get("properties"), part.get("required")
        properties.update(found if isinstance(found, Mapping) else {})
        if isinstance(needed, list):
            required.update(name for name in needed if isinstance(name, str))
    return properties, required


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    yield resolve(schema, schema)
    yield schema
    whole = schema.get("allOf")
    for part in whole if isinstance(whole, list) else ():
        yield resolve(part, schema)


def resolve(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema at the end of a chain of references within `root`; empty: none."""
    for _ in range(20):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root if schema["$ref"].startswith("#") else None
        for word in schema["$ref"].split("/")[1:]:
            key = unquote(word).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = {str(index): member for index, member in enumerate(target)}
            target = target.get(key) if isinstance(target, Mapping) else None
        schema = target
    return schema if isinstance(schema, dict) else {}


def value_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a value of `schema` may have; empty: unknown. Keywords as `properties` and
    `items` stand for a missing type (`implied_type`). If no type is found, a reference counts as an
    object. Each schema is read once: references may be many, or circular."""
    found, todo, known, refers = set[str](), [schema], set[int](), False
    while todo:
        part = todo.pop()
        if not isinstance(part, Mapping) or id(part) in known:
            continue
        known.add(id(part))
        kinds = _declared_types(part)
        found |= kinds
        if not kinds and isinstance(part.get("$ref"), str):
            refers = True
            todo.append(resolve(part, root))
        elif not kinds:
            values = part.get("enum", [part["const"]] if "const" in part else [])
            listed, branches = values if isinstance(values, list) else [], [*_branches(part)]
            found |= {type_of(value) for value in listed}
            todo += branches
            if not listed and not branches:
                found |= implied_type(part)
    return frozenset(found or ({"object"} if refers else ()))


def implied_type(schema: Mapping[str, Any]) -> set[str]:
    """The type of a schema without `type`, if all its keywords are of one type; else empty."""
    found = {kind for kind, words in _IMPLIED.items() if words & schema.keys()}
    return found if "type" not in schema and len(found) == 1 else set()


def listed_values(schema: Any, root: Mapping[str, Any]) -> list[Any] | None:
    """All values of a schema that lists them; `None`: it does not. Each schema is read once."""
    found: list[Any] = []
    todo, known = [resolve(schema, root)], set[int]()
    while todo:
        part = todo.pop()
        branches = part.get("anyOf") or part.get("oneOf")
        if "const" in part:
            found.append(part["const"])
        elif isinstance(part.get("enum"), list):
            found += part["enum"]
        elif part.get("type") == "null":
            found.append(None)
        elif not isinstance(branches, list) or not branches:
            return None
        elif id(part) not in known:
            known.add(id(part))
            todo += [resolve(branch, root) for branch in reversed(branches)]
        if len(found) > MOST_CHOICES:
            return None
    return found or None


def _declared_types(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    return {_json_type(name) for name in names if isinstance(name, str)}


def _branches(schema: Mapping[str, Any]) -> Iterator[Any]:
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        yield from branches if isinstance(branches, list) else ()


def _json_type(name: str) -> str:
    """The JSON type for names of other languages, such as `float32` or `List[str]`."""
    lower = name.strip().lower()
    return next((kind for p, kind in _PREFIXES.items() if lower.startswith(p)), lower)


def type_of(value: Any) -> str:
    """The JSON type of a value; `number` for 1.0."""
    return _TYPES.get(type(value), "object")


def read_json(reader: TextReader, emit: Emit) -> Reading[None]:
    """Read one JSON value and emit its text as it comes, as valid JSON: raw line ends in strings
    are escaped, a comma before a closing bracket is dropped, Python's literals become JSON's.
    Raises `NotACall` at the first character that cannot be JSON, and for 101 levels of nesting."""
    return JsonReader(reader, emit).value()


@dataclass
class JsonReader:
    """What `read_json` does. A format with other strings, keys or scalars overrides the methods."""

    reader: TextReader
    emit: Emit
    depth: int = 0
    quotes: tuple[str, ...] = ('"',)
    comma: ClassVar[str] = ","  # emitted for "," that was read; `colon` for ":"
    colon: ClassVar[str] = ":"

    def value(self, key: str = "") -> Reading[None]:
        """Read one value. `key`: its name in an object."""
        first = yield from self.reader.at(*self.quotes, "{", "[")
        if first in ("{", "["):
            yield from self.items(first)
        elif first:
            yield from self.string(first, self.emit)
        else:
            yield from self.scalar(key)

    def items(self, opener: str) -> Reading[None]:
        """Read an object or a list, whose bracket is `opener`."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise NotACall("nested too deeply")
        reader, emit, end, key = self.reader, self.emit, "}" if opener == "{" else "]", ""
        emit(reader.skip(1))
        before = yield from self.space()
        while not (yield from reader.accept(end)):
            if opener == "{":
                key = yield from self.key(before)
            else:
                emit(before)
            yield from self.value(key)
            before = yield from self.space()
            if (yield from reader.accept(",")):
                following = yield from self.space()
                if not (yield from reader.at(end)):
                    before += self.comma + following
            elif not (yield from reader.at(end)):
                yield from reader.expect(end)
        emit(before + end)
        self.depth -= 1

    def space(self) -> Reading[str]:
        """Read white space. Returns the text to emit for it."""
        return (yield from self.reader.space())

    def key(self, before: str) -> Reading[str]:
        """A key up to its value, emitted after `before`. Returns its name, if `scalar` needs it."""
        reader = self.reader
        if (yield from reader.peek()) != '"':
            yield from reader.char()
            raise NotACall("a key must be a string")
        self.emit(before)
        yield from self.string('"', self.emit)
        self.emit((yield from self.space()))
        yield from reader.expect(":")
        self.emit(self.colon + (yield from self.space()))
        return ""

    def string(self, quote: str, emit: Emit) -> Reading[None]:
        reader = self.reader
        emit(reader.skip(1))
        while True:
            emit((yield from reader.run_some(_PLAIN)))
            character = yield from reader.char()
            if character == quote:
                emit(character)
                return
            if character == "\\":
                emit((yield from _read_escape(reader)))
            else:
                emit(json.dumps(character)[1:-1] if character < " " else character)

    def scalar(self, key: str) -> Reading[None]:
        """Read a number or a literal; `key` as in `value`."""
        text = yield from self.reader.run(_SCALAR)
        if text not in _LITERALS and not _NUMBER.fullmatch(text):
            if not text:
                yield from self.reader.char()
            raise NotACall("not a JSON value")
        self.emit(_LITERALS.get(text, text))


def _read_escape(reader: TextReader) -> Reading[str]:
    escaped = yield from reader.char()
    if escaped == "u":
        digits = ""
        for _ in range(4):
            digits += yield from reader.char()
        if _HEX.issuperset(digits):
            return "\\u" + digits
    elif escaped in '"\\/bfnrt':
        return "\\" + escaped
    elif escaped == "'":
        return "'"
    raise NotACall("bad escape")
