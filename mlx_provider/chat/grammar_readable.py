"""Whether what a grammar would force can be read back by the format's own parser."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import BadRequest
from ..protocol import GenerateRequest
from ..records import ToolParser
from .grammar_request import demanded
from .grammar_shapes import CallShape
from .reply import Reply


def check_readable(request: GenerateRequest, parser: ToolParser, shape: CallShape) -> None:
    """Raise `BadRequest` for a tool that must be callable but whose calls would be lost.

    A call without arguments is written in the shape and read by the parser.
    """
    names = demanded(request)
    for tool in request.tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or (names and name not in names):
            continue
        if names_read(empty_call(shape, name), parser) != [name]:
            raise BadRequest(
                f"tool {name!r} cannot be enforced: calls of it are not readable in this model's "
                f"call format ({parser.name}); rename it, or leave tool_choice at auto",
                param="tools",
            )


def empty_call(shape: CallShape, name: str) -> str:
    """A call without arguments."""
    before = shape.before.replace("{name}", name).replace("{digits}", "0")
    return shape.open + before + ("" if shape.tagged else "{}") + shape.after + shape.close


def names_read(text: str, parser: ToolParser) -> Sequence[str]:
    """Names of the calls that a parser finds in a text."""
    reply = Reply(tool_parser=parser)
    deltas = reply.push_text(text) + reply.finish("stop")[0]
    return [call.name for delta in deltas for call in delta.tool_calls if call.name is not None]
