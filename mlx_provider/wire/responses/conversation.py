"""Turns items and tools of the Responses API into messages and tools of chat. An item that only
another server can have made is of an earlier turn and becomes text (`chat.messages.parts`)."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from ...errors import wrong_part
from ...invalid import quote
from ..api import Fields, Turns, check_kind, expect, objects, parts_of

# -- tools and parameters

HOSTED = tuple(
    "apply_patch code_interpreter computer file_search image_generation local_shell mcp"
    " programmatic_tool_calling shell tool_search web_search".split()
)
"""Prefixes of the types of tools that a server runs itself; they have no effect here."""
FORMATS = ("text", "json_object", "json_schema")  # types of `text.format`
ABSENT = {
    "prompt": "stored prompts are not known here: send the text as instructions and input",
    "background": "answers are not stored: leave it out and read the answer as it comes",
}

TEXT = "content"
DESCRIPTION = "The {} content following the specified format"
"""Name and description of the only parameter of a custom tool's function, as in LiteLLM's bridge
(1.106.2, `custom_tools.py`). `{}`: the tool's name."""


def wrap_text(text: str) -> str:
    """The arguments of a call of a custom tool, as JSON."""
    return json.dumps({TEXT: text}, ensure_ascii=False)


def unwrap_text(arguments: str) -> str:
    """The text in `arguments`, which may be cut off. Arguments that are no object are the text."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(TEXT, "") if isinstance(found, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text)


@dataclass(frozen=True)
class ToolName:
    """A tool's name in this API."""

    name: str
    namespace: str | None = None
    custom: bool = False  # whether the tool takes a text in place of arguments

    @property
    def chat_name(self) -> str:
        """The name of its function in chat."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class ChatTools:
    """The tools of a request as functions of chat. A custom tool becomes a function with one text
    parameter. Its format becomes one of `grammars` (see `GenerateRequest.tool_grammars`)."""

    def __init__(self, given: Any = None, *, lenient: bool = False) -> None:
        """`given`: the parameter `tools`. `lenient`: a tool of an unknown type has no effect.
        Raises `BadRequest` for a wrong tool."""
        self.tools: list[dict[str, Any]] = []
        self.grammars: dict[str, dict[str, str]] = {}
        self.names: dict[str, ToolName] = {}  # by the name in chat
        self.places: dict[str, str] = {}  # by path in `tools`: the place in the request
        self.ignored: list[str] = []  # tools without effect, such as `tools[0] (web_search)`
        self._lenient = lenient
        for where, tool in objects([] if given is None else given, "tools"):
            self._add(tool, where)

    def choice(self, given: Any) -> Any:
        """The parameter `tool_choice` in the form of chat."""
        if not isinstance(given, Mapping):
            return given
        if given.get("type") in ("function", "custom"):
            return _chat_choice(given)
        if isinstance(given.get("tools"), list):
            return {**given, "tools": [_chat_choice(tool) for tool in given["tools"]]}
        return dict(given)

    def _add(self, tool: Fields, where: str, space: Fields | None = None) -> None:
        kind = tool.get("type")
        if kind == "namespace" and space is None:
            for at, member in objects(tool.get("tools"), f"{where}.tools"):
                self._add(member, at, tool)
        elif kind in ("function", "custom"):
            self._add_callable(tool, where, space or {}, kind)
        elif isinstance(kind, str) and kind and (self._lenient or kind.startswith(HOSTED)):
            self.ignored.append(f"{where} ({kind})")
        else:
            raise wrong_part(where, f"is {quote(kind)}, which is not supported", ".type")

    def _add_callable(self, tool: Fields, where: str, space: Fields, kind: str) -> None:
        name = expect(tool.get("name") or None, str, where, ".name")
        tool_name = ToolName(name, space.get("name"), custom=kind == "custom")
        chat_name = tool_name.chat_name
        if chat_name in self.names:
            raise wrong_part(where, f"has the name of another tool, {chat_name}")
        self.names[chat_name] = tool_name
        texts = [part.get("description") for part in (space, tool)]
        described = "\n\n".join(text for text in texts if isinstance(text, str) and text)
        given = {key: tool[key] for key in ("parameters", "strict") if tool.get(key) is not None}
        if tool_name.custom:
            text = {"type": "string", "description": DESCRIPTION.format(chat_name)}
            schema = {"type": "object", "properties": {TEXT: text}, "required": [TEXT]}
            given = {"parameters": schema}
            if grammar := _grammar(tool.get("format"), where):
                self.grammars[chat_name] = grammar
                described += "\n\nFormat:\n```{type}\n{value}\n```".format(**grammar)
        function = {"name": chat_name, "description": described, **given}
        place = f"tools[{len(self.tools)}]"
        self.places.update({place: where, f"{place}.function": where})
        self.tools.append({"type": "function", "function": function})


def _grammar(form: Any, where: str) -> dict[str, str] | None:
    """`None`: any text."""
    if isinstance(form, Mapping) and isinstance(form.get("grammar"), Mapping):
        form = {**form, **form["grammar"]}
    match form:
        case None | {"type": "text"}:
            return None
        case {
            "type": "grammar",
            "syntax": "lark" | "regex" as syntax,
            "definition": str(value),
        } if value:
            return {"type": syntax, "value": value}
    allowed = "type text, or of type grammar with a syntax (lark or regex) and a definition"
    raise wrong_part(where, f"must be of {allowed}", ".format")


def _chat_choice(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        return tool
    name = ToolName(tool["name"], tool.get("namespace")).chat_name
    return {"type": "function", "function": {"name": name}}


def check_parameters(values: Fields, absent: Mapping[str, str]) -> None:
    """Refuse `absent` parameters, each with its remedy, and unknown types of `text.format`."""
    for name, remedy in absent.items():
        if values.get(name):
            raise wrong_part(name, f"is not supported: {remedy}")
    match values.get("text"):
        case {"format": {**form}}:
            check_kind(form.get("type"), "text.format.type", FORMATS)


# -- items

ROLES = ("user", "assistant", "system", "developer")
ITEMS = tuple(
    "message reasoning function_call function_call_output custom_tool_call"
    " custom_tool_call_output".split()
)
RESULTS = ("_output", "_result")  # endings of the types of items with the result of a call
TEXTS = ("input_text", "output_text", "text")
ITEM_PARTS = (*TEXTS, "input_image", "image_url", "refusal", "encrypted_content")
"""Types of parts. `encrypted_content` comes from another server and cannot be read here."""


def known_item(item: Fields, known: Collection[str]) -> Fields:
    """The item in a `known` type. If its own is unknown, what a client runs becomes a call or its
    result, and what a server has run becomes a part of the assistant's message."""
    kind, call_id = str(item.get("type") or "message"), item.get("call_id")
    if kind in known:
        return item
    if kind.endswith(RESULTS) and call_id:
        output = item.get("output", item.get("content"))
        parts = output if isinstance(output, str) else [{**item}]
        return {"type": "function_call_output", "call_id": call_id, "output": parts}
    if kind.endswith("_call") and call_id:
        fields = {n: v for n, v in item.items() if n not in ("type", "id", "call_id", "status")}
        call = {"name": kind.removesuffix("_call"), "arguments": json.dumps(fields)}
        return {"type": "function_call", "call_id": call_id, **call}
    return {"type": "message", "role": "assistant", "content": [{**item}]}


def is_typed(last: Sequence[Fields]) -> bool:
    """Whether the user has just typed the last of these (one or two) items: an unknown part is then
    refused. After a result, agents send messages of their own, too."""
    kinds = [str(item.get("type") or "message") for item in last]
    users = kinds[-1:] == ["message"] and (last[-1].get("role") or "user") == "user"
    return users and not kinds[0].endswith(RESULTS)


def _check_parts(content: Any, where: str, known: Collection[str] | None) -> None:
    for at, kind, part in parts_of(content, where, known, texts=True):
        if kind in TEXTS:
            expect(part.get("text"), str, at, ".text")
        if kind == "input_image" and known is not None and not part.get("image_url"):
            raise wrong_part(at, "is missing: send a data: or https: URL", ".image_url")


def messages_of(given: Any, instructions: Any = None) -> Turns:
    """The messages of chat for the parameters `input` (`given`) and `instructions`."""
    turns = _Turns({"messages": "input"})
    if instructions:
        turns.add({"role": "system", "content": instructions}, "instructions", "instructions")
    if isinstance(given, str):
        turns.add({"role": "user", "content": given}, "input", "input")
        return turns
    listed = [*objects(given, "input")]
    typed = is_typed([item for _, item in listed[-2:]])
    for at, (where, item) in enumerate(listed, 1):
        turns.take(item, where, typed=typed and at == len(listed))
    return turns


class _Turns(Turns):
    _open: dict[str, Any] | None = None  # the assistant's message that its next item joins

    def add(self, message: dict[str, Any], where: str, content: str = "") -> None:
        self._open = None
        super().add(message, where, content)

    def take(self, item: Fields, where: str, *, typed: bool) -> None:
        kind = item.get("type") or "message"
        # a part in place of an item is a mistake; other unknown types are read as text
        check_kind(kind, f"{where}.type", ITEMS if kind in ITEM_PARTS else None)
        is_known, item = kind in ITEMS, known_item(item, ITEMS)
        kind = item.get("type") or "message"
        if kind == "message":
            if is_known:
                role = check_kind(item.get("role") or "user", f"{where}.role", ROLES)
                known = ITEM_PARTS if typed or role in ("system", "developer") else None
                _check_parts(item.get("content"), f"{where}.content", known)
            self._message(item, where, f"{where}.content[{{}}]" if is_known else where)
        elif kind == "reasoning":
            self._thought(item, where)
        elif kind.endswith("_output"):
            if not item.get("call_id"):
                raise wrong_part(where, "is missing: send the call's", ".call_id")
            if is_known:
                _check_parts(item.get("output"), f"{where}.output", None)
            output = {"tool_call_id": item["call_id"], "content": item.get("output")}
            self.add({"role": "tool", **output}, where, f"{where}.output")
        else:
            self._call(item, where, custom=kind == "custom_tool_call")

    def _message(self, item: Fields, where: str, part: str) -> None:
        """`part`: the place of each part; `{}` in it stands for the part's index."""
        role, content = item.get("role") or "user", item.get("content")
        if role != "assistant":
            self.add({"role": role, "content": content}, where)
            return
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        said = self._assistant(where).setdefault("content", [])
        for at in range(len(parts)):
            self.place(f".content[{len(said) + at}]", part.format(at))
        said.extend(parts)

    def _thought(self, item: Fields, where: str) -> None:
        if self._open is not None and self._open.keys() > {"role", "reasoning_content"}:
            self._open = None  # thoughts come first in a turn
        content, summary = (_texts(item, where, name) for name in ("content", "summary"))
        if text := "\n\n".join(content or summary):
            turn = self._assistant(where)
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{before}\n\n{text}" if before else text

    def _call(self, item: Fields, where: str, *, custom: bool) -> None:
        name = ToolName(str(item.get("name") or ""), item.get("namespace")).chat_name
        arguments = wrap_text(str(item.get("input") or "")) if custom else item.get("arguments")
        call = {"id": item.get("call_id") or item.get("id"), "type": "function"}
        calls = self._assistant(where).setdefault("tool_calls", [])
        self.place(f".tool_calls[{len(calls)}]", where)
        self.place(f".tool_calls[{len(calls)}].function", where)
        calls.append({**call, "function": {"name": name, "arguments": arguments}})

    def _assistant(self, where: str) -> dict[str, Any]:
        if self._open is None:
            self.add({"role": "assistant"}, where)
            self._open = self.messages[-1]
        return self._open


def _texts(thought: Fields, where: str, name: str) -> list[str]:
    """A field of a thought, which is a text or a list of texts and of objects with one."""
    parts = thought.get(name)
    if parts is None or isinstance(parts, str):
        return [parts] if parts else []
    if isinstance(parts, list):
        parts = [{"text": part} if isinstance(part, str) else part for part in parts]
    texts = [part.get("text") for _, part in objects(parts, f"{where}.{name}")]
    return [text for text in texts if isinstance(text, str)]
