"""Messages of Anthropic's API as messages of chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
FAILED = "Error: "


def chat_messages(system: Any, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages that `shape.check_messages` has passed. Chat itself reads text, images and thoughts
    in Anthropic's form."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *(turn for message in messages for turn in _turns(message))]


def _turns(message: Mapping[str, Any]) -> Iterator[Message]:
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    # Results follow their calls; templates accept no text between the two.
    yield from (_result(block) for block in content if block["type"] == "tool_result")
    calls = [_call(block) for block in content if block["type"] == "tool_use"]
    others = [_part(b) for b in content if b["type"] not in ("tool_result", "tool_use")]
    if calls:
        yield {"role": role, "content": others or None, "tool_calls": calls}
    elif others or not content:
        yield {"role": role, "content": others}


def _result(block: Mapping[str, Any]) -> Message:
    """Chat has no mark for an error, so its text begins with one."""
    content = block.get("content")
    if block.get("is_error") is True:
        parts = content if isinstance(content, list) else []
        first = FAILED + content if isinstance(content, str) else FAILED.rstrip()
        content = [{"type": "text", "text": first}, *parts] if parts else first
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input")}
    return {"id": block.get("id"), "type": "function", "function": function}


def _part(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """A summary of earlier turns is text to a model."""
    if block["type"] == "compaction":
        return {"type": "text", "text": block.get("content")}
    return block
