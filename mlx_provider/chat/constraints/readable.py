"""Whether what a grammar would force can be read back by the format's own parser."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import BadRequest
from ...protocol.messages import GenerateRequest
from ...records import CallGrammar, ToolParser
from ..output.reply import Reply
from .request import demanded


def check_readable(request: GenerateRequest, parser: ToolParser) -> None:
    """Raise `BadRequest` for a tool that must be callable but whose calls would be lost.

    A call without arguments is written in its grammar and read by the parser.
    """
    names = demanded(request)
    for tool in request.tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or (names and name not in names):
            continue
        found = read_calls(empty_call(parser.call_grammar(), name), parser)
        if found.names != (name,):
            raise BadRequest(
                f"tool {name!r} cannot be enforced: calls of it are not readable in this model's "
                f"call format ({'; '.join(found.faults) or parser.name}); rename it, or leave "
                "tool_choice at auto",
                param="tools",
            )


def empty_call(grammar: CallGrammar, name: str) -> str:
    """A call without arguments."""
    before = grammar.before.replace("{name}", name).replace("{digits}", "0")
    return grammar.open + before + ("" if grammar.tagged else "{}") + grammar.after + grammar.close


@dataclass(frozen=True)
class ReadCalls:
    """Names of the calls that a parser finds in a text, and what went wrong in it."""

    names: tuple[str, ...]
    faults: tuple[str, ...]


def read_calls(text: str, parser: ToolParser) -> ReadCalls:
    """Read a whole reply."""
    reply = Reply(tool_parser=parser)
    deltas = reply.push_text(text) + reply.finish("stop")[0]
    names = (call.name for delta in deltas for call in delta.tool_calls)
    return ReadCalls(tuple(name for name in names if name is not None), tuple(reply.faults))
