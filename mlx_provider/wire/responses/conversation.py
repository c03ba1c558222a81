"""Items of the Responses API as messages of chat."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from ..objects import objects
from ..openai.custom_tools import wrapped
from .shape import ITEMS, known_item
from .tools import Called

SUMMARY = "Summary of the conversation so far:\n\n"


def messages_of(given: Any, instructions: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Messages for a checked input, and the places of their parts in it."""
    turns = _Turns()
    if instructions:
        turns.add({"role": "system", "content": instructions}, "instructions", "instructions")
    if isinstance(given, str):
        turns.add({"role": "user", "content": given}, "input", "input")
        return turns.messages, turns.places
    for where, item in objects(given, "input"):
        turns.take(item, where)
    return turns.messages, turns.places


def sealed(summary: str) -> str:
    """The `encrypted_content` of a compaction, in a form that only this server reads."""
    return b64encode(summary.encode()).decode()


def compaction_text(item: Mapping[str, Any]) -> str | None:
    """The summary in a compaction; `None`: another server's."""
    try:
        return SUMMARY + b64decode(str(item.get("encrypted_content")), validate=True).decode()
    except ValueError:
        return None


class _Turns:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places = {"messages": "input"}
        self._open: dict[str, Any] | None = None
        """The assistant's message that the next item may belong to."""

    def add(self, message: dict[str, Any], where: str, content: str = "") -> None:
        """`where`: the place of the item; `content`: of its content, by default inside it."""
        self._open = None
        self.messages.append(message)
        self._place("", where)
        self._place(".content", content or f"{where}.content")

    def _place(self, part: str, where: str) -> None:
        self.places[f"messages[{len(self.messages) - 1}]{part}"] = where

    def take(self, item: Mapping[str, Any], where: str) -> None:
        given, item = item, known_item(item, ITEMS)
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where, f"{where}.content[{{}}]" if item is given else where)
        elif kind == "reasoning":
            self._thought(item, where)
        elif kind == "compaction" and (text := compaction_text(item)):
            self.add({"role": "user", "content": text}, where)
        elif kind == "compaction":
            self._message({"role": "assistant", "content": [item]}, where, where)
        elif kind.endswith("_output"):
            output = {"tool_call_id": item["call_id"], "content": item.get("output")}
            self.add({"role": "tool", **output}, where, f"{where}.output")
        else:
            self._call(item, where, custom=kind == "custom_tool_call")

    def _message(self, item: Mapping[str, Any], where: str, part: str) -> None:
        role, content = item.get("role") or "user", item.get("content")
        if role != "assistant":
            self.add({"role": role, "content": content}, where)
            return
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        said = self._assistant(where).setdefault("content", [])
        for at in range(len(parts)):
            self._place(f".content[{len(said) + at}]", part.format(at))
        said.extend(parts)

    def _thought(self, item: Mapping[str, Any], where: str) -> None:
        if self._open is not None and self._open.keys() > {"role", "reasoning_content"}:
            self._open = None  # thoughts come first in a turn
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        text = "\n\n".join(text for text in texts if isinstance(text, str))
        if text:
            turn = self._assistant(where)
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{before}\n\n{text}" if before else text

    def _call(self, item: Mapping[str, Any], where: str, *, custom: bool) -> None:
        name = Called(str(item.get("name") or ""), item.get("namespace")).chat_name
        arguments = wrapped(str(item.get("input") or "")) if custom else item.get("arguments")
        call = {
            "id": item.get("call_id") or item.get("id"),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        calls = self._assistant(where).setdefault("tool_calls", [])
        self._place(f".tool_calls[{len(calls)}]", where)
        self._place(f".tool_calls[{len(calls)}].function", where)
        calls.append(call)

    def _assistant(self, where: str) -> dict[str, Any]:
        if self._open is None:
            self.add({"role": "assistant"}, where)
            self._open = self.messages[-1]
        return self._open
