"""A whole reply, put together from its deltas as a client does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ...protocol.events import Delta
from .reply import Reply


@dataclass(frozen=True)
class WholeReply:
    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments as text."""
    reason: str
    faults: tuple[str, ...] = field(default=(), compare=False)

    @property
    def whole_calls(self) -> list[tuple[str, Any]]:
        """With parsed arguments; only calls whose arguments are complete JSON."""
        return [(name, json.loads(text)) for name, text in self.calls if _is_json(text)]

    @property
    def cut_calls(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if not _is_json(call[1])]


def put_together(deltas: Iterable[Delta], reason: str) -> WholeReply:
    content = reasoning = ""
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        for piece in delta.tool_calls:
            name, arguments = calls.get(piece.index, ("", ""))
            calls[piece.index] = name + (piece.name or ""), arguments + piece.arguments
    return WholeReply(content, reasoning, tuple(calls.values()), reason)


def read_chunks(chunks: Iterable[str], **formats: Any) -> WholeReply:
    reply = Reply(**formats)
    deltas = [delta for chunk in chunks for delta in reply.push_text(chunk)]
    last, reason = reply.finish("stop")
    return replace(put_together(deltas + last, reason), faults=tuple(reply.faults))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
