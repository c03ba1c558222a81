"""Checks that the format's own parser can read what a grammar would force."""

from __future__ import annotations

import json

from ...errors import BadRequest
from ...protocol.requests import GenerateRequest
from ...records import ToolParser, listed_parameters
from ...records.parameters import function_of
from ..output.whole_reply import WholeReply, read_chunks
from .request import demanded
from .written import written_call


def check_readable(request: GenerateRequest, parser: ToolParser) -> None:
    """Raise `BadRequest` for a callable tool whose calls the parser would lose: the parser reads a
    call with all parameters, written by the grammar."""
    names = demanded(request)
    for tool in request.tools:
        function = function_of(tool)
        name = function.get("name")
        if not isinstance(name, str) or (names and name not in names):
            continue
        parameters = function.get("parameters")
        schema = parameters if isinstance(parameters, dict) else {}
        keys = tuple(listed_parameters(schema)[0])
        text = written_call(parser.call_grammar(), name, dict.fromkeys(keys, "x"), schema)
        found = read_chunks([text], tool_parser=parser, tools=request.tools)
        if [(called, _keys(given)) for called, given in found.calls] != [(name, keys)]:
            raise _unreadable(name, found, parser)


def _unreadable(name: str, found: WholeReply, parser: ToolParser) -> BadRequest:
    lost = "its parameters" if [name] == [called for called, _ in found.calls] else "it"
    return BadRequest(
        f"tool {name!r} cannot be enforced: calls of it are not readable in this model's "
        f"call format ({'; '.join(found.faults) or parser.name}); rename {lost}, or leave "
        "tool_choice at auto",
        param="tools",
    )


def _keys(arguments: str) -> tuple[str, ...]:
    try:
        value = json.loads(arguments)
    except ValueError:
        return ()
    return tuple(value) if isinstance(value, dict) else ()
