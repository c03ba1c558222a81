"""Tools of the Responses API as tools of chat, and the calls of a reply under their own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import BadRequest
from ..body import objects
from ..openai.answer import function_of, grammar_of, without

HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
)
"""Prefixes of the types of tools that a server runs itself; they have no effect here."""
MEMBERS = ("name", "description", "parameters", "strict", "format", "type")


@dataclass(frozen=True)
class Called:
    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def chat_name(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


@dataclass(frozen=True)
class ChatTools:
    tools: list[dict[str, Any]] = field(default_factory=list)
    called: dict[str, Called] = field(default_factory=dict)
    """By the name in chat."""
    grammars: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the name in chat; see `GenerateRequest.tool_grammars`."""
    places: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    lenient: bool = False

    @classmethod
    def read(cls, given: Any, *, lenient: bool = False) -> ChatTools:
        """Raises `BadRequest` that names the tool. `lenient`: an unknown type has no effect."""
        made = cls(lenient=lenient)
        for where, tool in objects(given or [], "tools"):
            made._add(tool, where)
        return made

    def choice(self, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if given.get("type") in ("function", "custom"):
            return _named(given)
        if isinstance(given.get("tools"), list):
            return {**given, "tools": [_named(tool) for tool in given["tools"]]}
        return dict(given)

    def _add(
        self, tool: Mapping[str, Any], where: str, space: Mapping[str, Any] | None = None
    ) -> None:
        kind = tool.get("type")
        if kind == "namespace" and space is None:
            for at, member in objects(tool.get("tools"), f"{where}.tools"):
                self._add(member, at, tool)
        elif kind in ("function", "custom"):
            self._add_callable(tool, where, space or {}, custom=kind == "custom")
        elif self.lenient or (isinstance(kind, str) and kind.startswith(HOSTED)):
            self.ignored.append(f"{where} ({kind})")
        else:
            raise BadRequest(f"{where}.type is {kind!r}, which is not supported", param=where)

    def _add_callable(
        self, tool: Mapping[str, Any], where: str, space: Mapping[str, Any], *, custom: bool
    ) -> None:
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"{where}.name must be a text", param=where)
        called = Called(name, space.get("name"), custom)
        if called.chat_name in self.called:
            raise BadRequest(f"{where}: there is another tool {called.chat_name}", param=where)
        self.called[called.chat_name] = called
        texts = [each.get("description") for each in (space, tool)]
        function: dict[str, Any] = {
            "name": called.chat_name,
            "description": "\n\n".join(text for text in texts if isinstance(text, str) and text),
        }
        if custom:
            form = tool.get("format")
            grammar = grammar_of(form, where)
            if grammar is not None:
                self.grammars[called.chat_name] = grammar
            function |= function_of(name, form, function["description"])
        else:
            function |= {
                key: tool[key] for key in ("parameters", "strict") if tool.get(key) is not None
            }
        own = f"tools[{len(self.tools)}]"
        self.places.update({own: where, f"{own}.function": where})
        rest = without(tool, MEMBERS)
        self.tools.append({**rest, "type": "function", "function": function})


def _named(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        return tool
    name = Called(tool["name"], tool.get("namespace")).chat_name
    return {"type": "function", "function": {"name": name}}
