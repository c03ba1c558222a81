"""Items of the Responses API as messages of chat."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from ...errors import BadRequest
from ..objects import objects
from ..openai.custom_tools import wrapped
from .tools import Called

SUMMARY = "Summary of the conversation so far:\n\n"


def messages_of(given: Any, instructions: Any) -> list[dict[str, Any]]:
    """Messages for a checked input."""
    turns = _Turns()
    if instructions:
        turns.add({"role": "system", "content": instructions})
    if isinstance(given, str):
        turns.add({"role": "user", "content": given})
        return turns.messages
    for where, item in objects(given, "input"):
        turns.take(item, where)
    return turns.messages


def sealed(summary: str) -> str:
    """The `encrypted_content` of a compaction. The form says that it is for us alone to read."""
    return b64encode(summary.encode()).decode()


def _opened(item: Mapping[str, Any], where: str) -> str:
    try:
        return b64decode(str(item.get("encrypted_content")), validate=True).decode()
    except ValueError:
        at = f"{where}.encrypted_content"
        raise BadRequest(f"{at} is not from this server", param=at) from None


class _Turns:
    """Joins the items of one turn of the assistant: thoughts, texts and calls."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The assistant's message, to which the next item may belong."""

    def add(self, message: dict[str, Any]) -> None:
        self._open = None
        self.messages.append(message)

    def take(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            self._thought(item)
        elif kind == "compaction":
            self.add({"role": "user", "content": SUMMARY + _opened(item, where)})
        elif kind.endswith("_output"):
            output = {"tool_call_id": item["call_id"], "content": item.get("output")}
            self.add({"role": "tool", **output})
        else:
            self._call(item, custom=kind == "custom_tool_call")

    def _message(self, item: Mapping[str, Any]) -> None:
        role, content = item.get("role") or "user", item.get("content")
        if role != "assistant":
            self.add({"role": role, "content": content})
            return
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        self._assistant().setdefault("content", []).extend(parts)

    def _thought(self, item: Mapping[str, Any]) -> None:
        if self._open is not None and self._open.keys() > {"role", "reasoning_content"}:
            self._open = None  # thoughts come first in a turn
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        text = "\n\n".join(text for text in texts if isinstance(text, str))
        if text:
            turn = self._assistant()
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{before}\n\n{text}" if before else text

    def _call(self, item: Mapping[str, Any], *, custom: bool) -> None:
        name = Called(str(item.get("name") or ""), item.get("namespace")).chat_name
        arguments = wrapped(str(item.get("input") or "")) if custom else item.get("arguments")
        call = {
            "id": item.get("call_id") or item.get("id"),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self) -> dict[str, Any]:
        if self._open is None:
            self.add({"role": "assistant"})
            self._open = self.messages[-1]
        return self._open
