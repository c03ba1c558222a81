"""Requests of the Responses API, checked before LiteLLM turns them into chat.

Its bridge carries over the kinds that it knows and drops the rest without a word (1.106.2,
`responses/litellm_completion_transformation/transformation.py`), so that a model would answer a
part of what was asked. The tables hold what it carries. Its bridge of the Messages API
(`llms/anthropic/pass_through/adapters/transformation.py`) carries what `wire.anthropic.shape` lets
pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from ..errors import BadRequest
from ..wire.objects import check_known, check_text, objects

ROLES = ("user", "assistant", "system", "developer")
ITEMS: tuple[str, ...] = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "tool_result",
    "web_search_call",
    "additional_tools",
)
SEARCHES = "litellm.responses.litellm_completion_transformation.client_tool_search"
"""A module of the lines of LiteLLM that carry three kinds more (1.109.1 has it, 1.106.2 not)."""
if find_spec(SEARCHES):
    ITEMS = (*ITEMS, "compaction", "tool_search_call", "tool_search_output")
TEXTS = ("input_text", "output_text", "text")
PARTS = (*TEXTS, "input_image", "image_url")
ITEM_PARTS = (*PARTS, "refusal", "encrypted_content")
ABSENT = {
    "prompt": "stored prompts are not known here: send the text as instructions and input",
    "background": "answers are not stored: leave it out and read the answer as it comes",
}
"""Parameters that the bridge drops though they decide what is answered, and the remedy."""

FORMATS = ("text", "json_object", "json_schema")


def check_responses(kwargs: Mapping[str, Any]) -> None:
    """A call of `/v1/responses`. Raises `BadRequest` that names the item or part."""
    for name, remedy in ABSENT.items():
        if kwargs.get(name):
            raise BadRequest(f"{name} is not supported: {remedy}", param=name)
    _check_format(kwargs.get("text"))
    items = kwargs.get("input")
    if isinstance(items, str):
        return
    for where, item in objects(items, "input"):
        _check_item(item, where)


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


def _check_format(text: Any) -> None:
    form = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(form, Mapping):
        check_known(form.get("type"), FORMATS, "text.format.type")


def _check_item(item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type") or "message"
    check_known(kind, ITEMS, f"{where}.type")
    if kind == "message":
        check_known(item.get("role") or "user", ROLES, f"{where}.role")
        _check_parts(item.get("content"), f"{where}.content", ITEM_PARTS)
    elif kind.endswith(("call_output", "_result")):
        if not item.get("call_id"):
            raise BadRequest(f"{where}.call_id is missing: send the call's", param=where)
        if isinstance(item.get("output"), list):
            _check_parts(item["output"], f"{where}.output", PARTS)


def _check_parts(content: Any, where: str, known: Collection[str]) -> None:
    if content is None or isinstance(content, str):
        return
    for at, part in objects(content, where, texts=True):
        kind = part.get("type") or "text"
        check_known(kind, known, f"{at}.type")
        if kind in TEXTS:
            check_text(part, at)
        if kind == "input_image" and not part.get("image_url"):
            raise BadRequest(f"{at}.image_url is missing: send a data: or https: URL", param=at)
