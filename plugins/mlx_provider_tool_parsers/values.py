"""For formats with arguments as bare text between tags: looks ahead, finds types in the request's
tools, and writes text as JSON of these types. `Arguments` reports a call while it is read."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_provider.records import (
    Reading,
    TextReader,
    Tools,
    listed_parameters,
    listed_values,
    type_of,
    value_types,
)


def behind(reader: TextReader, opener: str, *wanted: str) -> Reading[str]:
    """The text of `wanted` that follows `opener` and white space; empty: none. Reads nothing."""
    mark = reader.mark()
    yield from reader.accept(opener)
    yield from reader.space()
    found = yield from reader.at(*wanted)
    reader.rewind(mark)
    return found


def accept_spaced(reader: TextReader, *wanted: str) -> Reading[str]:
    """Read white space and one of `wanted`, which is returned; empty: nothing was read."""
    mark = reader.mark()
    yield from reader.space()
    found = yield from reader.accept(*wanted)
    if found:
        reader.drop_mark()
    else:
        reader.rewind(mark)
    return found


def closes(reader: TextReader, closer: str, *following: str) -> Reading[bool]:
    """Read `closer` if one of `following` or the reply's end comes next. False: nothing is read."""
    mark = reader.mark()
    reader.skip(len(closer))
    yield from reader.space()
    found = yield from reader.at(*following)
    if found or not (yield from reader.peek()):
        reader.drop_mark()
        return True
    reader.rewind(mark)
    return False


Repeats = Literal["mistake", "apart", "text"]
"""Of two closing tags in a row, the first one ends the value (`mistake`), does so only if white
space separates them (`apart`), or is text of the value (`text`)."""
Unknown = Literal["string", "json"]
"""How a value of unknown type is read: `string`: as text, unless it is a JSON object or list;
`json`: as JSON or a Python literal, else as text."""


def functions(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """The functions of the tools, by name."""
    found = (tool.get("function", tool) for tool in tools)
    return {x["name"]: x for x in found if isinstance(x, Mapping) and "name" in x}


def accepts(tools: Tools) -> Callable[[str], bool]:
    """(name) -> whether a tool has it. Without tools, every name is valid."""
    names = frozenset(functions(tools))
    return lambda name: not names or name in names


def properties(tools: Tools, name: str) -> Mapping[str, Any]:
    """Schemas of the parameters of the tool `name`, by key; empty for an unknown tool."""
    return listed_parameters(functions(tools).get(name, {}).get("parameters"))[0]


def types(tools: Tools, name: str, key: str) -> frozenset[str]:
    """JSON types that the parameter `key` of the tool `name` can have; empty: unknown."""
    return value_types(*_parameter(tools, name, key))


def enum_values(tools: Tools, name: str, key: str) -> list[Any]:
    """Values that the parameter's schema lists, as in `enum`; empty: it lists none."""
    return listed_values(*_parameter(tools, name, key)) or []


def _parameter(tools: Tools, name: str, key: str) -> tuple[Any, Mapping[str, Any]]:
    root = functions(tools).get(name, {}).get("parameters")
    return properties(tools, name).get(key), root if isinstance(root, Mapping) else {}


def is_text(wanted: frozenset[str], unknown: Unknown) -> bool:
    """Whether a value of the types `wanted` (empty: unknown) is read as text."""
    return wanted == {"string"} if wanted else unknown == "string"


def as_json(
    text: str, wanted: frozenset[str], unknown: Unknown, members: Sequence[Any] = ()
) -> str:
    """Bare text as JSON of one of the types `wanted` (empty: unknown). `members`: the values that
    the schema lists. Other text becomes a string, which the client's validation reports."""
    if not wanted and unknown == "string":
        return _container(text) or json.dumps(text, ensure_ascii=False)
    converted = _convert(text, wanted)
    if members and json.loads(converted) not in members and text.strip() in members:
        return json.dumps(text.strip(), ensure_ascii=False)
    return converted


def _convert(text: str, wanted: frozenset[str]) -> str:
    if wanted == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    if bare.lower() in ("null", "none") and ("null" in wanted or "string" not in wanted):
        return "null"
    if "string" in wanted and not wanted & _STRUCTURED:
        return json.dumps(text, ensure_ascii=False)
    if bare in ("True", "False") and ("boolean" in wanted or not wanted):
        return bare.lower()
    if "boolean" in wanted and bare.lower() in ("true", "false"):
        return bare.lower()
    if wanted & {"integer", "number"} and _WHOLE.fullmatch(bare):
        return str(int(bare))
    literal = _literal(bare)
    if literal is None or not _fits(literal, wanted):
        return json.dumps(text, ensure_ascii=False)
    return literal


_WHOLE = re.compile(r"[-+]?\d{1,300}")
_STRUCTURED = frozenset({"object", "array", "integer", "number", "boolean"})


def _container(text: str) -> str:
    """`text` without white space around it, if it is a JSON object or list; else empty."""
    bare = text.strip()
    if bare[:1] not in ("{", "["):
        return ""
    try:
        json.loads(bare, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return ""
    return bare


def _literal(text: str) -> str | None:
    """JSON of a JSON value or Python literal; `None`: it is neither."""
    try:
        with suppress(ValueError):
            json.loads(text, parse_constant=refuse_constant)
            return text
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def refuse_constant(constant: str) -> Any:
    """For `json.loads`, which would read `NaN` and `Infinity`. Raises `ValueError`."""
    raise ValueError(f"{constant} is not JSON")


def _fits(literal: str, wanted: frozenset[str]) -> bool:
    if not wanted:
        return True
    found = type_of(json.loads(literal))
    if found == "integer" and "number" in wanted:
        return True
    if found == "number" and "integer" in wanted:
        return float(literal).is_integer()
    return found in wanted


@dataclass
class Arguments:
    """Reports one call as JSON: `begin`; for each value `open`, `piece`, `close`; then `end`.
    `lines`: line ends directly inside the tags of a value belong to the tags."""

    report: TextReader
    tools: Tools
    name: str
    unknown: Unknown = "string"  # how a value without a type in the schema is read
    lines: bool = True
    begun: bool = False
    keys: list[str] = field(default_factory=list)
    is_text: bool = False
    _parts: list[str] = field(default_factory=list)  # of a value that is no text
    _first: str = ""  # character of the value
    _last: str = ""
    _line_end: str = ""  # not reported yet, because it may belong to the closing tag

    def begin(self) -> None:
        """Report the call's name. From then on, it is a call."""
        if not self.begun:
            self.begun = True
            self.report.call(self.name)

    def open(self, key: str, force_text: bool | None = None, *, bracket: bool = False) -> None:
        """Begin the value of `key`. `force_text`: whether it is a string, if the format says so.
        `bracket`: the value begins with a bracket, so it may be JSON if its type is unknown."""
        self.begin()
        self.report.arguments(("{" if not self.keys else ", ") + json.dumps(key) + ": ")
        self.keys.append(key)
        wanted = types(self.tools, self.name, key)
        text = is_text(wanted, self.unknown) and (bool(wanted) or not bracket)
        self.is_text = text if force_text is None else force_text
        self._parts, self._first, self._last, self._line_end = [], "", "", ""
        if self.is_text:
            self.report.arguments('"')

    @property
    def repeats(self) -> Repeats:
        """How to read two closing tags in a row. A value that begins on a new line ends on one."""
        if not self.lines or not self._first.startswith("\n"):
            return "apart"
        return "mistake" if self._last == "\n" else "text"

    def piece(self, text: str) -> None:
        """Add text to the value. Text of a string is reported at once."""
        begins = not self._first
        self._first = self._first or text[:1]
        self._last = text[-1:] or self._last
        if not self.is_text:
            self._parts.append(text)
        elif text:
            if begins and self.lines:
                text = text.removeprefix("\n")
            text = self._line_end + text
            self._line_end = "\n" if self.lines and text.endswith("\n") else ""
            shown = text.removesuffix(self._line_end)
            self.report.arguments(json.dumps(shown, ensure_ascii=False)[1:-1])

    def close(self, force_json: bool = False) -> None:
        """End the value. `force_json`: the format says that it is JSON, of any type."""
        if self.is_text:
            self.report.arguments('"')
            return
        text = "".join(self._parts)
        if self.lines:
            text = text.removeprefix("\n").removesuffix("\n")
        parameter = self.tools, self.name, self.keys[-1]
        wanted = frozenset[str]() if force_json else types(*parameter)
        unknown: Unknown = "json" if force_json else self.unknown
        self.report.arguments(as_json(text, wanted, unknown, enum_values(*parameter)))

    def end(self) -> None:
        """End the call."""
        self.begin()
        self.report.arguments("}" if self.keys else "{}")
        self.report.end_call()
