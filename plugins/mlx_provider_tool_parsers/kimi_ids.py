"""Kimi K2 names a call by an id, `functions.NAME:INDEX`. Models also write other forms."""

from __future__ import annotations

import json
import re

from mlx_provider import ToolCall
from mlx_provider.records import NotACall, Reading, TextReader, Tools, report_call

from .json_text import CALL_KEYS, read_whole
from .schema import functions, properties

_ID = re.compile(r"[\w.:/-]*")
_INDEX = re.compile(r":[^:]*$")
_COUNTER = re.compile(r"[_.-]?\d+$")
_OPAQUE = re.compile(
    r"(?:call|toolu|fc|tool|tool_call|chatcmpl)[-_][\w-]*|functions|\d*|(?=.*\d)[\da-f-]{8,}"
)
"""Ids of other models' servers: they hold no name."""


def kimi_name(text: str, tools: Tools) -> str:
    """The name in an id, preferably a declared one; empty: none. Raises `NotACall` if the text is
    not an id."""
    whole = text.strip()
    if not _ID.fullmatch(whole):
        raise NotACall("not an id")
    name = _INDEX.sub("", whole).removeprefix("functions.").removeprefix("functions:")
    last = name.rpartition(".")[2]
    known = functions(tools)
    for candidate in (whole, name, last, _COUNTER.sub("", name), _COUNTER.sub("", last)):
        if candidate in known:
            return candidate
    return "" if _OPAQUE.fullmatch(name) else name


def read_unnamed(reader: TextReader, tools: Tools) -> Reading[None]:
    """The arguments tell the tool. Raises `NotACall` if they fit no single one."""
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise NotACall("arguments are a JSON object")
    text = yield from read_whole(reader)
    call = _wrapped(text, tools) or _fitting(text, tools)
    if call is None:
        raise NotACall("an id without a name")
    report_call(reader, call)


def _wrapped(text: str, tools: Tools) -> ToolCall | None:
    value, known = json.loads(text), functions(tools)
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    fits = isinstance(name, str) and (name in known or not known) and isinstance(arguments, dict)
    if not fits or not CALL_KEYS.issuperset(value):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _fitting(text: str, tools: Tools) -> ToolCall | None:
    """A call of the tool that accepts these arguments, if there is exactly one."""
    keys = set(json.loads(text))
    fits = [
        name
        for name, function in functions(tools).items()
        if keys.issuperset(_required(function)) and keys.issubset(properties(tools, name))
    ]
    return ToolCall(fits[0], text) if len(fits) == 1 else None


def _required(function: object) -> list[str]:
    parameters = function.get("parameters") if isinstance(function, dict) else None
    found = parameters.get("required") if isinstance(parameters, dict) else None
    return [x for x in found if isinstance(x, str)] if isinstance(found, list) else []
