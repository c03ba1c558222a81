"""Custom tools, which take a text in place of arguments.

For the engine, such a tool is a function with one text, whose format is enforced as a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from ...errors import BadRequest
from ...protocol.events import Delta, Event, Finish, ToolCallDelta

TEXT = "content"
"""The parameter of a custom tool, as LiteLLM's bridge names it (1.106.2, `custom_tools.py`)."""
SYNTAXES = ("lark", "regex")


def function_of(name: str, form: Any, description: str) -> dict[str, Any]:
    """The function of a custom tool: one text, whose format the description tells."""
    syntax = ""
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        syntax = f"\n\nFormat:\n```{form.get('syntax')}\n{form.get('definition')}\n```"
    text = {"type": "string", "description": f"The {name} content following the specified format"}
    return {
        "description": description + syntax,
        "parameters": {"type": "object", "properties": {TEXT: text}, "required": [TEXT]},
    }


def grammar_of(form: Any, where: str) -> dict[str, str] | None:
    """The grammar of a custom tool's text, see `GenerateRequest.tool_grammars`. `None`: any text.

    `where`: the tool's place. Raises `BadRequest` that names it.
    """
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return None
    known = isinstance(form, Mapping) and form.get("type") == "grammar"
    syntax, value = (form.get("syntax"), form.get("definition")) if known else (None, None)
    if syntax not in SYNTAXES or not isinstance(value, str) or not value:
        raise BadRequest(
            f"{where}.format must be of type text, or of type grammar with a syntax (lark or "
            "regex) and a definition",
            param=where,
        )
    return {"type": syntax, "value": value}


def wrapped(text: str) -> str:
    """The text of a custom tool as arguments."""
    return json.dumps({TEXT: text}, ensure_ascii=False)


def unwrapped(arguments: str) -> str:
    """The text in the arguments of a custom tool, which may be cut."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(TEXT, "") if isinstance(found, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text)


# -- in chat


def names_of(tools: Any) -> frozenset[str]:
    """The names of the custom tools among tools of chat."""
    own = [_of(tool).get("name") for tool in _listed(tools)]
    return frozenset(name for name in own if isinstance(name, str))


def as_functions(tools: Any) -> dict[str, Any]:
    """The fields `tools` and `tool_grammars` of a request for tools of chat.

    Raises `BadRequest` that names a malformed custom tool.
    """
    if not any(map(_is_custom, _listed(tools))):
        return {"tools": tools}
    made, grammars = [], {}
    for at, tool in enumerate(tools):
        if not _is_custom(tool):
            made.append(tool)
            continue
        where, own = f"tools[{at}].custom", _of(tool)
        name, form = own.get("name"), own.get("format")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"{where}.name must be a text", param=where)
        if isinstance(form, Mapping) and isinstance(form.get("grammar"), Mapping):
            form = {**form, **form["grammar"]}
        grammar = grammar_of(form, where)
        if grammar is not None:
            grammars[name] = grammar
        described = own.get("description")
        function = function_of(name, form, described if isinstance(described, str) else "")
        made.append({"type": "function", "function": {"name": name, **function}})
    return {"tools": made, "tool_grammars": grammars}


def choice_of(choice: Any) -> Any:
    """A `tool_choice` that names functions alone."""
    if _is_custom(choice):
        return {"type": "function", "function": {"name": _of(choice).get("name")}}
    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    if not isinstance(allowed, Mapping):
        return choice
    tools = [choice_of(tool) for tool in _listed(allowed.get("tools"))]
    return {**choice, "allowed_tools": {**allowed, "tools": tools}}


def with_functions(messages: Sequence[Any]) -> list[Any]:
    """Messages whose calls of custom tools are calls of functions."""
    return [_with_functions(message) for message in messages]


def _with_functions(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not any(map(_is_custom, _listed(calls))):
        return message
    return {**message, "tool_calls": [_as_call(call) for call in _listed(calls)]}


def _as_call(call: Any) -> Any:
    if not _is_custom(call):
        return call
    arguments = wrapped(str(_of(call).get("input") or ""))
    function = {"name": _of(call).get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def with_custom(call: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A call of a reply, as one of a custom tool if it is."""
    function = call["function"]
    if function["name"] not in names:
        return call
    custom = {"name": function["name"], "input": unwrapped(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": custom}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_custom(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "custom"


def _of(value: Any) -> Mapping[str, Any]:
    own = value.get("custom") if _is_custom(value) else None
    return own if isinstance(own, Mapping) else {}


class WholeCalls:
    """Holds the calls of custom tools in a stream until they are complete."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the custom tools."""
        self._names = names
        self._held: dict[int, ToolCallDelta] = {}
        """The last call of each choice."""

    def of(self, event: Event) -> Iterator[Event]:
        """The event, or what there is of it now."""
        if isinstance(event, Delta) and self._names and event.tool_calls:
            pieces = [each for piece in event.tool_calls for each in self._of(event.index, piece)]
            yield event.model_copy(update={"tool_calls": pieces})
            return
        if isinstance(event, Finish) and event.index in self._held:
            yield Delta(index=event.index, tool_calls=[self._held.pop(event.index)])
        yield event

    def _of(self, choice: int, piece: ToolCallDelta) -> Iterator[ToolCallDelta]:
        held = self._held.get(choice)
        if held is not None and held.index == piece.index:
            whole = held.arguments + piece.arguments
            self._held[choice] = held.model_copy(update={"arguments": whole})
            return
        if held is not None:
            yield self._held.pop(choice)
        if piece.name in self._names:
            self._held[choice] = piece
        else:
            yield piece
