"""What `mlx-provider parse` does: shows authors of plugins what their parsers find in replies."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..chat.output.whole_reply import check_reply, read_chunks
from ..errors import BadRequest, PluginError
from ..registry import PluginRegistry


class ParseRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    id: str | int | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chunks: list[str]  # pieces of one reply, in order
    tools: list[dict[str, Any]] | None = None
    prompt_opened_think: bool = False
    """The prompt ended inside a thought. If not, the parser decides how the reply begins."""
    stop: list[str] = Field(default_factory=list)
    response_format: dict[str, Any] | None = None


def parse_lines(lines: Iterable[str], registry: PluginRegistry) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.strip():
            yield parse_line(line, registry)


def parse_line(line: str, registry: PluginRegistry) -> dict[str, Any]:
    """The answer to one `ParseRequest` in JSON. A wrong request gives `id` and `error`."""
    request_id: Any = None
    try:
        data = json.loads(line)
        request_id = data.get("id") if isinstance(data, dict) else None
        return parse_reply(ParseRequest.model_validate(data), registry)
    except (BadRequest, ValueError, RecursionError) as error:  # pydantic's are `ValueError`s
        code = getattr(error, "code", "invalid_request")
        return {"id": request_id, "error": {"code": code, "message": str(error)}}


def parse_reply(request: ParseRequest, registry: PluginRegistry) -> dict[str, Any]:
    """What the named parsers find. If one fails, `error` has its fault. Raises `BadRequest`."""
    given = (request.tool_parser, request.reasoning_parser, request.response_format)
    if all(part is None for part in given):
        raise BadRequest(
            "name a tool_parser, a reasoning_parser or a response_format", param="tool_parser"
        )
    tools, thoughts = request.tool_parser, request.reasoning_parser
    reply = read_chunks(
        request.chunks,
        stops=request.stop,
        tools=request.tools or (),
        tool_parser=None if tools is None else registry.tool_parser(tools),
        reasoning_parser=None if thoughts is None else registry.reasoning_parser(thoughts),
        reasoning_open=True if request.prompt_opened_think else None,
    )
    found: dict[str, Any] = {
        "id": request.id,
        "content": reply.content or None,
        "reasoning_content": reply.reasoning or None,
        "tool_calls": [{"name": name, "arguments": value} for name, value in reply.whole_calls],
    }
    if cut := [{"name": name, "arguments": text} for name, text in reply.cut_calls]:
        found["unfinished_calls"] = cut  # the reply ended inside them
    if request.response_format is not None:
        check = check_reply(found["content"] or "", request.response_format)
        found |= {"parsed": check.parsed, "valid": check.is_valid, "violated": check.violated}
    if reply.faults:
        found["error"] = {"code": PluginError.code, "message": "; ".join(reply.faults)}
    return found
