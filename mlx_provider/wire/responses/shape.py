"""Checks of the input of the Responses API, which name the item or part at fault."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...errors import BadRequest
from ..objects import check_known, check_text, objects

ROLES = ("user", "assistant", "system", "developer")
ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)
TEXTS = ("input_text", "output_text", "text")
PARTS = (*TEXTS, "input_image", "image_url")
ITEM_PARTS = (*PARTS, "refusal", "encrypted_content")
FORMATS = ("text", "json_object", "json_schema")
ABSENT = {
    "prompt": "stored prompts are not known here: send the text as instructions and input",
    "background": "answers are not stored: leave it out and read the answer as it comes",
}
"""Parameters that need a store, and the remedy."""


def check_input(
    values: Mapping[str, Any], absent: Mapping[str, str], known: Collection[str]
) -> None:
    """The parameters of a request and its input. Raises `BadRequest`.

    `absent`: parameters that are refused, and the remedy. `known`: types of items.
    """
    for name, remedy in absent.items():
        if values.get(name):
            raise BadRequest(f"{name} is not supported: {remedy}", param=name)
    text = values.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(form, Mapping):
        check_known(form.get("type"), FORMATS, "text.format.type")
    items = values.get("input")
    if not isinstance(items, str):
        for where, item in objects(items, "input"):
            _check_item(item, where, known)


def _check_item(item: Mapping[str, Any], where: str, known: Collection[str]) -> None:
    kind = item.get("type") or "message"
    check_known(kind, known, f"{where}.type")
    if kind == "message":
        check_known(item.get("role") or "user", ROLES, f"{where}.role")
        _check_parts(item.get("content"), f"{where}.content", ITEM_PARTS)
    elif kind == "reasoning":
        for name in ("content", "summary"):
            if not isinstance(item.get(name), str | None):
                list(objects(item[name], f"{where}.{name}", texts=True))
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
