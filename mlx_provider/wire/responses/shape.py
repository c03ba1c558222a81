"""Checks of the input of the Responses API. Items of other servers are earlier turns and become
text (`chat.messages.foreign`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import BadRequest
from ..objects import check_kind, check_known, check_text, objects

ROLES = ("user", "assistant", "system", "developer")
ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "compaction",
)
RESULTS = ("_output", "_result")
"""Endings of the types of items with the result of a call."""
TEXTS = ("input_text", "output_text", "text")
PARTS = (*TEXTS, "input_image", "image_url")
ITEM_PARTS = (*PARTS, "refusal", "encrypted_content")
FORMATS = ("text", "json_object", "json_schema")
ABSENT = {
    "prompt": "stored prompts are not known here: send the text as instructions and input",
    "background": "answers are not stored: leave it out and read the answer as it comes",
}
"""Parameters that need a store, and the remedy."""


def check_input(values: Mapping[str, Any], absent: Mapping[str, str]) -> None:
    """`absent`: parameters that are refused, and the remedy. Raises `BadRequest` that names the
    item or part."""
    for name, remedy in absent.items():
        if values.get(name):
            raise BadRequest(f"{name} is not supported: {remedy}", param=name)
    text = values.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(form, Mapping):
        check_known(form.get("type"), FORMATS, "text.format.type")
    items = values.get("input")
    if not isinstance(items, str):
        listed = [*objects(items, "input")]
        typed = is_typed([item for _, item in listed[-2:]])
        for at, (where, item) in enumerate(listed, 1):
            _check_item(item, where, typed=typed and at == len(listed))


def known_item(item: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    """An item of an unknown type, as a known one: what a client runs is a call or its result, what
    a server has run is a part of the assistant's message."""
    kind, call_id = str(item.get("type") or "message"), item.get("call_id")
    if kind in known:
        return item
    if kind.endswith(RESULTS) and call_id:
        output = item.get("output", item.get("content"))
        parts = output if isinstance(output, str) else [{**item}]
        return {"type": "function_call_output", "call_id": call_id, "output": parts}
    if kind.endswith("_call") and call_id:
        fields = {n: v for n, v in item.items() if n not in ("type", "id", "call_id", "status")}
        call = {"name": kind.removesuffix("_call"), "arguments": json.dumps(fields)}
        return {"type": "function_call", "call_id": call_id, **call}
    return {"type": "message", "role": "assistant", "content": [{**item}]}


def is_typed(last: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a user has just typed the last item: it follows no result."""
    kinds = [str(item.get("type") or "message") for item in last]
    users = kinds[-1:] == ["message"] and (last[-1].get("role") or "user") == "user"
    return users and not kinds[0].endswith(RESULTS)


def _check_item(item: Mapping[str, Any], where: str, *, typed: bool) -> None:
    kind = item.get("type") or "message"
    check_kind(kind, f"{where}.type")
    if kind in ITEM_PARTS:
        check_known(kind, ITEMS, f"{where}.type")
    elif kind == "message":
        role = item.get("role") or "user"
        check_known(role, ROLES, f"{where}.role")
        strict = typed or role in ("system", "developer")
        _check_parts(item.get("content"), f"{where}.content", ITEM_PARTS if strict else None)
    elif kind == "reasoning":
        for name in ("content", "summary"):
            if not isinstance(item.get(name), str | None):
                list(objects(item[name], f"{where}.{name}", texts=True))
    elif kind in ITEMS and kind.endswith(RESULTS):
        if not item.get("call_id"):
            raise BadRequest(f"{where}.call_id is missing: send the call's", param=where)
        if isinstance(item.get("output"), list):
            _check_parts(item["output"], f"{where}.output", None)


def _check_parts(content: Any, where: str, known: Collection[str] | None) -> None:
    """`known`: types that a model can take; `None`: others become text."""
    if content is None or isinstance(content, str):
        return
    for at, part in objects(content, where, texts=True):
        kind = part.get("type") or "text"
        if known is None:
            check_kind(kind, f"{at}.type")
        else:
            check_known(kind, known, f"{at}.type")
        if kind in TEXTS:
            check_text(part, at)
        if kind == "input_image" and known is not None and not part.get("image_url"):
            raise BadRequest(f"{at}.image_url is missing: send a data: or https: URL", param=at)
