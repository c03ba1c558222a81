"""Replies read piece by piece, and what a client would make of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..chat.output.reply import Reply
from ..protocol.events import Delta


@dataclass(frozen=True)
class Read:
    """What came of a reply."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments, as text, in order."""
    reason: str
    faults: tuple[str, ...] = field(default=(), compare=False)
    """What the parsers raised."""

    @property
    def whole_calls(self) -> list[tuple[str, Any]]:
        """Calls whose arguments are complete JSON."""
        found = []
        for name, arguments in self.calls:
            try:
                found.append((name, json.loads(arguments)))
            except ValueError:
                continue
        return found


def put_together(deltas: Iterable[Delta], reason: str) -> Read:
    """What a client would make of the deltas."""
    content = reasoning = ""
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        for piece in delta.tool_calls:
            name, arguments = calls.get(piece.index, ("", ""))
            assert piece.name is None or piece.index not in calls, "a call begins once"
            calls[piece.index] = (piece.name or name, arguments + piece.arguments)
    return Read(content, reasoning, tuple(calls.values()), reason)


def read_chunks(chunks: Iterable[str], **formats: Any) -> Read:
    """Feed pieces of a reply to a fresh state machine, to its end."""
    reply = Reply(**formats)
    deltas = [delta for chunk in chunks for delta in reply.push_text(chunk)]
    last, reason = reply.finish("stop")
    return replace(put_together(deltas + last, reason), faults=tuple(reply.faults))
