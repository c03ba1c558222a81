"""Tool messages as plain text, for chat templates that know no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .normalise import BLANK_LINE


def has_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is anything to fold."""
    return any(m.get("role") == "tool" or m.get("tool_calls") for m in messages)


def fold_tools(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls as JSON in the assistant's text, results as the user's text; no text is lost.

    Takes and gives canonical messages (`messages.normalise`); user and assistant alternate
    afterwards as far as the roles allow.
    """
    folded: list[dict[str, Any]] = []
    for message in map(_folded, messages):
        if folded and folded[-1]["role"] == message["role"] != "system":
            folded[-1] = _joined(folded[-1], message)
        else:
            folded.append(message)
    return folded


def _folded(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id", "name")}
    if message.get("role") == "tool":
        return {**kept, "role": "user"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return {**kept, "content": kept.get("content") or ""}
    written = [json.dumps({"name": c["name"], "arguments": c["arguments"]}) for c in calls]
    return _joined({**kept, "content": kept.get("content") or ""}, {"content": "\n".join(written)})


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    a, b = first["content"], second["content"]
    if isinstance(a, str) and isinstance(b, str):
        return {**first, "content": BLANK_LINE.join(text for text in (a, b) if text)}
    head, tail = _parts(a), _parts(b)
    if head and tail and head[-1]["type"] == tail[0]["type"] == "text":
        both = BLANK_LINE.join((head.pop()["text"], tail.pop(0)["text"]))
        head.append({"type": "text", "text": both})
    return {**first, "content": [*head, *tail]}


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
