"""Parsers by name, and replies read in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

import mlx_provider_reasoning_parsers as reasoning_plugin
import mlx_provider_tool_parsers as tool_plugin
from mlx_provider.chat.constraints.written import written_call
from mlx_provider.chat.output.reply import Reply
from mlx_provider.protocol.messages import Delta
from mlx_provider.records import ReasoningParser, ToolParser, type_of


@dataclass(frozen=True)
class Read:
    """What came of a reply."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments, as text, in order."""
    reason: str

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
    return put_together(deltas + last, reason)


def _by_name(parsers: Iterable[Any]) -> dict[str, Any]:
    found = {parser.name: parser for parser in parsers}
    for parser in list(found.values()):
        for alias in parser.aliases:
            found.setdefault(alias, parser)
    return found


TOOL_PARSERS: dict[str, ToolParser] = _by_name(tool_plugin.mlx_tool_parsers())
REASONING_PARSERS: dict[str, ReasoningParser] = _by_name(
    [*tool_plugin.mlx_reasoning_parsers(), *reasoning_plugin.mlx_reasoning_parsers()]
)


def written(parser: ToolParser, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model of this format writes it."""
    schema = {"properties": {key: {"type": type_of(value)} for key, value in arguments.items()}}
    return written_call(parser.call_grammar(), name, arguments, schema)


def tool(name: str, **types: str) -> dict[str, Any]:
    """A request's tool with parameters of these types, all required."""
    properties = {key: {"type": value} for key, value in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="session")
def tool_parsers() -> dict[str, ToolParser]:
    return TOOL_PARSERS


@pytest.fixture(scope="session")
def reasoning_parsers() -> dict[str, ReasoningParser]:
    return REASONING_PARSERS


@pytest.fixture(scope="session")
def read() -> Callable[..., Read]:
    return read_chunks
