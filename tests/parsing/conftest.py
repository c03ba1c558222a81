"""Parsers by name, and replies read in one line."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import mlx_provider_reasoning_parsers as reasoning_plugin
import mlx_provider_tool_parsers as tool_plugin
from mlx_provider.chat.output.whole_reply import WholeReply, put_together, read_chunks
from mlx_provider.records import ReasoningParser, ToolParser, type_of

__all__ = ["WholeReply", "put_together", "read_chunks"]


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
    return parser.call_grammar().write(name, arguments, schema)


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
def read() -> Callable[..., WholeReply]:
    return read_chunks
