"""Requests of the Responses and the Messages API, before LiteLLM turns them into chat.

LiteLLM's bridge of the Responses API converts the kinds that it knows (1.106.2,
`responses/litellm_completion_transformation/transformation.py`). It drops other items without an
error, so that a model would get only a part of the request, and passes other tools to the model.
`CARRIED` lists the items that it converts.

Its bridge of the Messages API (`llms/anthropic/pass_through/adapters/transformation.py`) converts
all blocks that `wire.anthropic.shape` permits. It loses `disable_parallel_tool_use` and writes
unknown members of a tool into its schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ..wire.anthropic.request import retains
from ..wire.anthropic.shape import check_messages
from ..wire.anthropic.tools import chat_tools, known_members
from ..wire.openai.custom_tools import as_functions
from ..wire.openai.parameters import Parameters
from ..wire.places import Places
from ..wire.responses.shape import ABSENT, ITEMS, check_input
from ..wire.responses.tools import ChatTools
from .carried import IGNORED

CARRIED: tuple[str, ...] = (*ITEMS, "tool_result", "web_search_call", "additional_tools")
SEARCHES = "litellm.responses.litellm_completion_transformation.client_tool_search"
"""A module of the lines of LiteLLM that carry three kinds more (1.109.1 has it, 1.106.2 not)."""
if find_spec(SEARCHES):
    CARRIED = (*CARRIED, "compaction", "tool_search_call", "tool_search_output")


def check_responses(kwargs: Mapping[str, Any]) -> None:
    """Check a call of `/v1/responses`. Raises `BadRequest` that names the item or part."""
    check_input(kwargs, ABSENT, CARRIED)


def carry_tools(kwargs: dict[str, Any]) -> None:
    """Pass the names of what has no effect in the tools of a call of `/v1/responses`. Raises
    `BadRequest` that names the tool at fault."""
    given = [tool for tool in kwargs.get("tools") or [] if not _runs_in_gateway(tool)]
    tools = ChatTools.read(given, lenient=True)
    _, members = as_functions(tools.tools)
    kwargs[IGNORED] = [*tools.ignored, *map(Places(tools.places).text, members)]


def _runs_in_gateway(tool: Any) -> bool:
    """Whether LiteLLM itself may run a tool: that of an MCP server which it serves."""
    url = tool.get("server_url") if isinstance(tool, Mapping) else None
    return isinstance(url, str) and (url.startswith("litellm_proxy") or "/mcp" in url)


def carry_messages(kwargs: dict[str, Any]) -> None:
    """Check a call of `/v1/messages` and pass what the bridge would lose. Raises `BadRequest` that
    names the message, block or tool."""
    check_messages(kwargs)
    made = chat_tools(Parameters({name: kwargs.get(name) for name in ("tools", "tool_choice")}))
    _, kwargs[IGNORED] = as_functions(made.get("tools", []))
    if kwargs.get("tools"):
        kwargs["tools"] = [known_members(tool) for tool in kwargs["tools"]]
    if made.get("parallel_tool_calls") is False:
        kwargs["parallel_tool_calls"] = False
    if retains(kwargs):
        kwargs["prompt_cache_retention"] = "24h"
    kwargs.pop("cache_control", None)  # every prompt is cached, as far as there is room


def carry_refusals(kwargs: dict[str, Any]) -> None:
    """Write refusals of earlier turns as text, which the bridge of 1.106.2 does not drop."""
    items = kwargs.get("input")
    if isinstance(items, list):
        kwargs["input"] = [_refusals_as_text(item) for item in items]


def _refusals_as_text(item: Any) -> Any:
    content = item.get("content") if isinstance(item, Mapping) else None
    if not isinstance(content, list):
        return item
    return {**item, "content": [_as_text(part) for part in content]}


def _as_text(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "refusal":
        return part
    return {"type": "output_text", "text": str(part.get("refusal") or "")}
