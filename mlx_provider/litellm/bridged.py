"""Requests of the Responses API, checked before LiteLLM turns them into chat.

LiteLLM's bridge converts the kinds that it knows and drops the rest without an error (1.106.2,
`responses/litellm_completion_transformation/transformation.py`), so that a model would get only a
part of the request. The tables list what it converts. Its bridge of the Messages API
(`llms/anthropic/pass_through/adapters/transformation.py`) converts everything that
`wire.anthropic.shape` permits.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ..wire.responses.shape import ABSENT, ITEMS, check_input

CARRIED: tuple[str, ...] = (*ITEMS, "tool_result", "web_search_call", "additional_tools")
SEARCHES = "litellm.responses.litellm_completion_transformation.client_tool_search"
"""A module of the lines of LiteLLM that carry three kinds more (1.109.1 has it, 1.106.2 not)."""
if find_spec(SEARCHES):
    CARRIED = (*CARRIED, "compaction", "tool_search_call", "tool_search_output")


def check_responses(kwargs: Mapping[str, Any]) -> None:
    """Check a call of `/v1/responses`. Raises `BadRequest` that names the item or part."""
    check_input(kwargs, ABSENT, CARRIED)


def carry_refusals(kwargs: dict[str, Any]) -> None:
    """Write refusals of earlier turns as text, which the bridge of 1.106.2 does not drop."""
    items = kwargs.get("input")
    if isinstance(items, list):
        kwargs["input"] = [_refusals_as_text(item) for item in items]


def _refusals_as_text(item: Any) -> Any:
    content = item.get("content") if isinstance(item, Mapping) else None
    if not isinstance(content, list):
        return item
    return {**item, "content": [_as_text(part) for part in content]}


def _as_text(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "refusal":
        return part
    return {"type": "output_text", "text": str(part.get("refusal") or "")}
