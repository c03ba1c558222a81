"""Messages of Anthropic's API as messages of chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
FAILED = "Error: "


def chat_messages(
    system: Any, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[Message], dict[str, str]]:
    """Messages that `shape.check_messages` has passed, and the places of their parts in the
    request. Chat itself reads text, images and thoughts in Anthropic's form."""
    made: list[Message] = [{"role": "system", "content": system}] if system else []
    places: dict[str, str] = {}
    if system:
        places |= {"messages[0]": "system", "messages[0].content": "system"}
    for at, message in enumerate(messages):
        for turn, parts in _turns(message, f"messages[{at}]"):
            own = f"messages[{len(made)}]"
            places |= {own + part: where for part, where in parts.items()}
            made.append(turn)
    return made, places


def _turns(message: Mapping[str, Any], where: str) -> Iterator[tuple[Message, dict[str, str]]]:
    """Each with the places of its parts; the empty name is the whole message."""
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}, {"": where}
        return
    blocks = [(block, f"{where}.content[{at}]") for at, block in enumerate(content)]
    # Templates accept no text between calls and their results.
    results = [(block, at) for block, at in blocks if block["type"] == "tool_result"]
    yield from ((_result(block), _of_result(block, at)) for block, at in results)
    calls = [(block, at) for block, at in blocks if block["type"] == "tool_use"]
    others = [(b, at) for b, at in blocks if b["type"] not in ("tool_result", "tool_use")]
    parts = {"": where, **{f".content[{n}]": at for n, (_, at) in enumerate(others)}}
    said = [_part(block) for block, _ in others]
    if calls:
        for n, (_, at) in enumerate(calls):
            parts |= {f".tool_calls[{n}]": at, f".tool_calls[{n}].function": at}
        made = [_call(block) for block, _ in calls]
        yield {"role": role, "content": said or None, "tool_calls": made}, parts
    elif others or not content:
        yield {"role": role, "content": said}, parts


def _result(block: Mapping[str, Any]) -> Message:
    """Chat has no mark for an error, so its text begins with one."""
    content = block.get("content")
    if block.get("is_error") is True:
        parts = content if isinstance(content, list) else []
        first = FAILED + content if isinstance(content, str) else FAILED.rstrip()
        content = [{"type": "text", "text": first}, *parts] if parts else first
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _of_result(block: Mapping[str, Any], where: str) -> dict[str, str]:
    content = block.get("content")
    parts = content if block.get("is_error") is True and isinstance(content, list) else []
    behind = {f".content[{at + 1}]": f"{where}.content[{at}]" for at in range(len(parts))}
    return {"": where, **behind}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input")}
    return {"id": block.get("id"), "type": "function", "function": function}


def _part(block: Mapping[str, Any]) -> Mapping[str, Any]:
    if block["type"] == "compaction":
        return {"type": "text", "text": block.get("content")}
    return block
