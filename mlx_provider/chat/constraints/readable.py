"""Checks that the format's own parser can read what a grammar would force."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ...errors import BadRequest
from ...protocol.requests import GenerateRequest
from ...records import ToolParser, Tools, listed_parameters
from ..output.reply import Reply
from .request import demanded
from .written import written_call


def check_readable(request: GenerateRequest, parser: ToolParser) -> None:
    """Raise `BadRequest` for a tool that must be callable but whose calls the parser would lose.

    The grammar writes a call with all parameters, and the parser reads it.
    """
    names = demanded(request)
    for tool in request.tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or (names and name not in names):
            continue
        parameters = function.get("parameters")
        schema = parameters if isinstance(parameters, dict) else {}
        keys = tuple(listed_parameters(schema)[0])
        text = written_call(parser.call_grammar(), name, dict.fromkeys(keys, "x"), schema)
        found = read_calls(text, parser, request.tools)
        if found.calls != ((name, keys),):
            raise _unreadable(name, found, parser)


def _unreadable(name: str, found: ReadCalls, parser: ToolParser) -> BadRequest:
    lost = "its parameters" if [name] == [called for called, _ in found.calls] else "it"
    return BadRequest(
        f"tool {name!r} cannot be enforced: calls of it are not readable in this model's "
        f"call format ({'; '.join(found.faults) or parser.name}); rename {lost}, or leave "
        "tool_choice at auto",
        param="tools",
    )


@dataclass(frozen=True)
class ReadCalls:
    """The calls that a parser finds in a text, and its faults."""

    calls: tuple[tuple[str, tuple[str, ...]], ...]
    """Name and parameters of each. No parameters if its arguments are not an object."""
    faults: tuple[str, ...]


def read_calls(text: str, parser: ToolParser, tools: Tools) -> ReadCalls:
    """Read a whole reply."""
    reply = Reply(tool_parser=parser, tools=tools)
    read: dict[int, list[str]] = {}
    for delta in reply.push_text(text) + reply.finish("stop")[0]:
        for piece in delta.tool_calls:
            call = read.setdefault(piece.index, ["", ""])
            call[0] += piece.name or ""
            call[1] += piece.arguments
    return ReadCalls(
        tuple((name, _keys(text)) for name, text in read.values()), tuple(reply.faults)
    )


def _keys(arguments: str) -> tuple[str, ...]:
    try:
        value = json.loads(arguments)
    except ValueError:
        return ()
    return tuple(value) if isinstance(value, dict) else ()
