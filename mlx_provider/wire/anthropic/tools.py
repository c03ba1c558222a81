"""Tools of Anthropic's API, and the choice among them, as those of chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import BadRequest
from ...invalid import shown
from ..objects import check_known, objects
from ..openai.custom_tools import without
from ..openai.parameters import Parameters

MEMBERS = ("name", "description", "strict")
BUILT_IN = ("bash_", "computer_", "memory_", "text_editor_")
"""Types of tools whose schema Anthropic's models know. All other types run on its servers."""
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": None}


def chat_tools(params: Parameters) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls`, if given. Raises `BadRequest` that names
    the tool, or the choice."""
    tools, choice = params.take("tools"), params.mapping("tool_choice")
    fields: dict[str, Any] = {}
    if tools is not None:
        fields["tools"] = [_tool(tool, where) for where, tool in objects(tools, "tools")]
    if choice:
        fields["tool_choice"] = _choice(choice)
        fields["parallel_tool_calls"] = not _alone(choice)
    return fields


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind, schema = tool.get("type") or "custom", tool.get("input_schema")
    if kind != "custom":
        built_in = isinstance(kind, str) and kind.startswith(BUILT_IN)
        reason = "only Anthropic's models know its schema" if built_in else "no server runs it here"
        raise BadRequest(
            f"{where}.type is {shown(kind)}: {reason}; send a tool of the client's own, with a "
            "name and an input_schema",
            param=where,
        )
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{where}.input_schema must be an object", param=where)
    given = {name: tool[name] for name in MEMBERS if name in tool}
    function = {**given, "parameters": schema}  # models know this order
    rest = without(tool, (*MEMBERS, "input_schema", "type"))
    return {**rest, "type": "function", "function": function}


def known_members(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in (*MEMBERS, "input_schema") if name in tool}


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    check_known(kind, CHOICES, "tool_choice.type")
    if kind != "tool":
        return CHOICES[str(kind)]
    name = choice.get("name")
    if not isinstance(name, str):
        raise BadRequest("tool_choice.name must be a text", param="tool_choice.name")
    return {"type": "function", "function": {"name": name}}


def _alone(choice: Mapping[str, Any]) -> bool:
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        raise BadRequest(
            f"tool_choice.disable_parallel_tool_use must be true or false, got {shown(alone)}",
            param="tool_choice",
        )
    return bool(alone)
