"""Requests of the Responses and Messages APIs, before LiteLLM turns them into chat.

LiteLLM's bridges silently drop the kinds that they do not know (1.106.2,
`responses/litellm_completion_transformation/transformation.py` and `llms/anthropic/pass_through/
adapters/transformation.py`). In a message that a user has just typed such parts are refused,
elsewhere they become text, as on the engine's own routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

from ..chat.messages.foreign import foreign_text
from ..errors import BadRequest
from ..wire.anthropic.request import (
    BLOCKS,
    RESULT_BLOCKS,
    answer_format,
    chat_tools,
    check_image,
    check_messages,
    known_members,
    retains,
)
from ..wire.api import ClientNames
from ..wire.openai.parameters import Parameters
from ..wire.openai.tools import as_functions
from ..wire.responses.conversation import (
    ABSENT,
    ITEM_PARTS,
    ITEMS,
    ChatTools,
    check_input,
    compaction_text,
    known_item,
)
from ..wire.responses.routes import LOGPROBS
from .call import IGNORED

CARRIED: tuple[str, ...] = tuple(kind for kind in ITEMS if kind != "compaction")
CARRIED = (*CARRIED, "tool_result", "additional_tools")
SEARCHES = "litellm.responses.litellm_completion_transformation.client_tool_search"
"""Only newer LiteLLM has this module (1.109.1, not 1.106.2). It carries the searches of tools that
a client runs, and drops those of a server."""
SEARCH_ITEMS = ("tool_search_call", "tool_search_output") if find_spec(SEARCHES) else ()
TAKES_PLACE = ": a text takes its place"


def fit_responses(kwargs: dict[str, Any]) -> list[str]:
    """Check a call of `/v1/responses`; what its bridge would drop becomes text. Returns warnings.
    Raises `BadRequest` that names the item or part."""
    check_input(kwargs, ABSENT)
    if LOGPROBS in (kwargs.get("include") or ()) or kwargs.get("top_logprobs"):
        kwargs["logprobs"] = True  # under chat's name, which the bridge passes on
    items, warnings = kwargs.get("input"), list[str]()
    if isinstance(items, list):
        kwargs["input"] = [_item(i, f"input[{at}]", warnings) for at, i in enumerate(items)]
    return warnings


def _item(given: Any, where: str, warnings: list[str]) -> Any:
    item = given.model_dump() if isinstance(given, BaseModel) else given
    searches = SEARCH_ITEMS if item.get("execution") == "client" else ()
    known = known_item(item, (*CARRIED, *searches))
    if item.get("type") == "compaction" and known is not item and (text := compaction_text(item)):
        return {"role": "user", "content": text}
    changed = dict(known)
    for name in ("content", "output"):
        parts = known.get(name)
        if isinstance(parts, list) and known.get("type") != "reasoning":
            kind = "output_text" if known.get("role") == "assistant" else "input_text"
            place = f"{where}.{name}[{{}}]" if known is item else where
            changed[name] = [
                _part(part, kind, place.format(at), warnings) for at, part in enumerate(parts)
            ]
    return given if changed == item else changed


def _part(part: Any, kind: str, where: str, warnings: list[str]) -> Any:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "refusal":  # which the bridge of 1.106.2 drops
        return {"type": "output_text", "text": str(part.get("refusal") or "")}
    image = part.get("type") == "input_image"
    if part.get("image_url") if image else (part.get("type") or "text") in ITEM_PARTS:
        return part
    warnings.append(f"{where} is of type {part.get('type')!r}{TAKES_PLACE}")
    return {"type": kind, "text": foreign_text(part)}


def fit_messages(kwargs: dict[str, Any]) -> list[str]:
    """Check a call of `/v1/messages`; what its bridge would drop becomes text. Returns warnings.
    Raises `BadRequest` that names the block."""
    check_messages(kwargs)
    warnings: list[str] = []
    kwargs["messages"] = [
        _with_text(message, BLOCKS[message["role"]], f"messages[{at}]", warnings)
        for at, message in enumerate(kwargs["messages"])
    ]
    return warnings


def _with_text(holder: Any, known: Any, where: str, warnings: list[str]) -> Any:
    content = holder.get("content")
    if not isinstance(content, list):
        return holder
    blocks = [_block(b, known, f"{where}.content[{at}]", warnings) for at, b in enumerate(content)]
    return {**holder, "content": blocks}


def _block(block: Mapping[str, Any], known: Any, where: str, warnings: list[str]) -> Any:
    kind = block.get("type")
    if kind == "tool_result":
        return _with_text(block, RESULT_BLOCKS, where, warnings)
    if kind in known and not (kind == "image" and _is_lost(block, where)):
        return block
    warnings.append(f"{where} is of type {kind!r}{TAKES_PLACE}")
    return {"type": "text", "text": foreign_text(block)}


def _is_lost(image: Mapping[str, Any], where: str) -> bool:
    try:
        check_image(image, where)
    except BadRequest:
        return True
    return False


def carry_schema(kwargs: dict[str, Any]) -> None:
    """The schema in a `json_object` of `/v1/responses`, which the bridge drops."""
    text = kwargs.get("text")
    if not isinstance(text, Mapping):
        return
    form = text.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_object" and form.get("schema"):
        schema = form["schema"]
        if isinstance(schema, Mapping):
            schema = {"type": "object", **schema}
        made = {"type": "json_schema", "name": "json_object", "schema": schema}
        kwargs["text"] = {**text, "format": made}


def carry_format(kwargs: dict[str, Any]) -> None:
    """Schema and effort of a call of `/v1/messages`. The bridge drops unknown types and an effort
    without adaptive thoughts, and demands every property of an object. Raises `BadRequest`."""
    given = {name: kwargs.get(name) for name in ("output_config", "output_format")}
    made = answer_format(Parameters(given))
    kwargs.update({name: value for name, value in made.items() if value is not None})
    if "response_format" in made:
        kwargs.pop("output_format", None)
        config: Mapping[str, Any] = given["output_config"] or {}
        kwargs["output_config"] = {key: config[key] for key in config if key != "format"}


def carry_tools(kwargs: dict[str, Any]) -> None:
    """Names of what has no effect in the tools of `/v1/responses`, whose bridge shows unknown tools
    to the model. Raises `BadRequest` that names the tool."""
    given = [tool for tool in kwargs.get("tools") or [] if not _runs_in_gateway(tool)]
    tools = ChatTools.read(given, lenient=True)
    _, members = as_functions(tools.tools)
    kwargs[IGNORED] = [*tools.ignored, *map(ClientNames(tools.places).text, members)]


def _runs_in_gateway(tool: Any) -> bool:
    """Whether LiteLLM may run a tool itself: one of an MCP server."""
    url = tool.get("server_url") if isinstance(tool, Mapping) else None
    return isinstance(url, str) and (url.startswith("litellm_proxy") or "/mcp" in url)


def carry_message_tools(kwargs: dict[str, Any]) -> None:
    """Tools and marks of a checked call of `/v1/messages`. The bridge loses
    `disable_parallel_tool_use` and writes unknown members of a tool into its schema. Raises
    `BadRequest` that names the tool."""
    made = chat_tools(Parameters({name: kwargs.get(name) for name in ("tools", "tool_choice")}))
    _, kwargs[IGNORED] = as_functions(made.get("tools", []))
    if kwargs.get("tools"):
        kwargs["tools"] = [known_members(tool) for tool in kwargs["tools"]]
    if made.get("parallel_tool_calls") is False:
        kwargs["parallel_tool_calls"] = False
    if retains(kwargs):
        kwargs["prompt_cache_retention"] = "24h"
    kwargs.pop("cache_control", None)  # every prompt is cached, as far as there is room
