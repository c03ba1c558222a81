"""Tools of chat: functions, and custom tools, which take a text in place of arguments. The engine
sees a custom tool as a function with one text, whose format is a grammar."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from ...errors import wrong_part
from ...invalid import shown
from ...protocol.events import Delta, Event, Finish, ToolCallDelta
from ..api import expect_object

TEXT = "content"
"""The parameter of a custom tool, as LiteLLM's bridge names it (1.106.2, `custom_tools.py`)."""
RESULT = ("return", "returns", "response")
MEMBERS = {
    "function": ("name", "description", "parameters", "strict", *RESULT),
    "custom": ("name", "description", "format"),
}
SETTLED = ("type", "cache_control", "eager_input_streaming")
MOST_NAMES = 32


def wrap_text(text: str) -> str:
    return json.dumps({TEXT: text}, ensure_ascii=False)


def unwrap_text(arguments: str) -> str:
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(TEXT, "") if isinstance(found, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text)


def custom_names(tools: Any) -> frozenset[str]:
    names = [_of(tool).get("name") for tool in _as_list(tools)]
    return frozenset(name for name in names if isinstance(name, str))


def as_functions(tools: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields `tools` and `tool_grammars` of a request, and the members of tools without effect:
    each once, with its first place."""
    functions: list[dict[str, Any]] = []
    grammars: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    for at, tool in enumerate(tools):
        kind = _kind(tool, f"tools[{at}]")
        where, own = f"tools[{at}].{kind}", tool[kind]
        unknown = [f".{name}" for name in without(tool, (*SETTLED, kind))]
        unknown += [f".{kind}.{name}" for name in without(own, MEMBERS[kind])]
        ignored = {name: f"tools[{at}]{name}" for name in unknown} | ignored
        if kind == "function":
            function = {name: value for name, value in own.items() if name in MEMBERS[kind]}
        else:
            function, grammar = _custom_function(own, where)
            grammars |= {own["name"]: grammar} if grammar else {}
        functions.append({"type": "function", "function": function})
    fields = {"tools": functions, "tool_grammars": grammars}
    return {name: value for name, value in fields.items() if value}, [*ignored.values()][
        :MOST_NAMES
    ]


def without(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in given.items()
        if name not in known and value not in (None, False)
    }


def _kind(tool: Any, where: str) -> str:
    kind = expect_object(tool, where).get("type") or "function"
    if not isinstance(kind, str) or kind not in MEMBERS:
        called = (
            "only tools of type function or custom can be called, and no server runs others here"
        )
        raise wrong_part(where, f"is {shown(kind)}: {called}", ".type")
    own = tool.get(kind)
    if not isinstance(own, Mapping):
        raise wrong_part(where, "must be an object with a name", f".{kind}")
    where = f"{where}.{kind}"
    if not isinstance(own.get("name"), str) or not own["name"].strip():
        raise wrong_part(f"{where}.name", "must be a text")
    if kind == "function" and own.get("parameters"):
        expect_object(own["parameters"], f"{where}.parameters")
    return kind


def _custom_function(own: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Any]:
    """The function, and its grammar (see `GenerateRequest.tool_grammars`); `None`: any text."""
    form, described, syntax = own.get("format"), own.get("description"), ""
    if isinstance(form, Mapping) and isinstance(form.get("grammar"), Mapping):
        form = {**form, **form["grammar"]}
    grammar = _grammar(form, where)
    if grammar is not None:
        syntax = f"\n\nFormat:\n```{grammar['type']}\n{grammar['value']}\n```"
    name, text = own["name"], described if isinstance(described, str) else ""
    content = {
        "type": "string",
        "description": f"The {name} content following the specified format",
    }
    parameters = {"type": "object", "properties": {TEXT: content}, "required": [TEXT]}
    return {"name": name, "description": text + syntax, "parameters": parameters}, grammar


def _grammar(form: Any, where: str) -> dict[str, str] | None:
    match form:
        case None | {"type": "text"}:
            return None
        case {
            "type": "grammar",
            "syntax": "lark" | "regex" as syntax,
            "definition": str(value),
        } if value:
            return {"type": syntax, "value": value}
    raise wrong_part(
        where,
        "must be of type text, or of type grammar with a syntax (lark or regex) and a definition",
        ".format",
    )


def choice_of(choice: Any) -> Any:
    if _is_custom(choice):
        return {"type": "function", "function": {"name": _of(choice).get("name")}}
    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    if not isinstance(allowed, Mapping):
        return choice
    tools = [choice_of(tool) for tool in _as_list(allowed.get("tools"))]
    return {**choice, "allowed_tools": {**allowed, "tools": tools}}


def with_functions(messages: Sequence[Any]) -> list[Any]:
    return [
        {**message, "tool_calls": [_as_function(call) for call in message["tool_calls"]]}
        if isinstance(message, Mapping)
        and any(map(_is_custom, _as_list(message.get("tool_calls"))))
        else message
        for message in messages
    ]


def _as_function(call: Any) -> Any:
    if not _is_custom(call):
        return call
    arguments = wrap_text(str(_of(call).get("input") or ""))
    function = {"name": _of(call).get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def whole_call(call: ToolCallDelta, custom: Collection[str]) -> dict[str, Any]:
    if call.name in custom:
        member = {"custom": {"name": call.name, "input": unwrap_text(call.arguments)}}
    else:
        member = {"function": {"name": call.name, "arguments": call.arguments}}
    return {"id": call.id, "type": next(iter(member)), **member}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_custom(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "custom"


def _of(value: Any) -> Mapping[str, Any]:
    own = value.get("custom") if _is_custom(value) else None
    return own if isinstance(own, Mapping) else {}


class WholeCalls:
    """Joins the calls of custom tools in a stream until each is complete."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._open: dict[int, ToolCallDelta] = {}

    def of(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Delta) and self._names and event.tool_calls:
            calls = [call for piece in event.tool_calls for call in self._of(event.index, piece)]
            yield event.model_copy(update={"tool_calls": calls})
            return
        if isinstance(event, Finish) and event.index in self._open:
            yield Delta(index=event.index, tool_calls=[self._open.pop(event.index)])
        yield event

    def _of(self, choice: int, piece: ToolCallDelta) -> Iterator[ToolCallDelta]:
        last = self._open.pop(choice, None)
        if last is not None and last.index == piece.index:
            piece = last.model_copy(update={"arguments": last.arguments + piece.arguments})
        elif last is not None:
            yield last
        if piece.name in self._names:
            self._open[choice] = piece
        else:
            yield piece
