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

from ..wire.anthropic.request import answer_format
from ..wire.openai.parameters import Parameters
from ..wire.responses.shape import ABSENT, ITEMS, check_input

CARRIED: tuple[str, ...] = (*ITEMS, "tool_result", "web_search_call", "additional_tools")
SEARCHES = "litellm.responses.litellm_completion_transformation.client_tool_search"
"""A module of the lines of LiteLLM that carry three kinds more (1.109.1 has it, 1.106.2 not)."""
if find_spec(SEARCHES):
    CARRIED = (*CARRIED, "compaction", "tool_search_call", "tool_search_output")


def check_responses(kwargs: Mapping[str, Any]) -> None:
    """Check a call of `/v1/responses`. Raises `BadRequest` that names the item or part."""
    check_input(kwargs, ABSENT, CARRIED)


def carry_schema(kwargs: dict[str, Any]) -> None:
    """Pass the schema in a `json_object` of a call of `/v1/responses`, which the bridge drops."""
    text = kwargs.get("text")
    if not isinstance(text, Mapping):
        return
    form = text.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_object" and form.get("schema"):
        schema = form["schema"]
        if isinstance(schema, Mapping):
            schema = {"type": "object", **schema}
        made = {"type": "json_schema", "name": "json_object", "schema": schema}
        kwargs["text"] = {**text, "format": made}


def carry_format(kwargs: dict[str, Any]) -> None:
    """Pass the schema and the effort of the answer to a call of `/v1/messages`. The bridge drops a
    type that it does not know and an effort without adaptive thoughts, and demands every property
    of an object. Raises `BadRequest`."""
    given = {name: kwargs.get(name) for name in ("output_config", "output_format")}
    made = answer_format(Parameters(given))
    kwargs.update({name: value for name, value in made.items() if value is not None})
    if "response_format" in made:
        kwargs.pop("output_format", None)
        config: Mapping[str, Any] = given["output_config"] or {}
        kwargs["output_config"] = {key: config[key] for key in config if key != "format"}


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
