"""Requests of the Responses and Messages APIs, checked before LiteLLM turns them into chat.

Its bridges carry over the kinds that they know and drop the rest without a word (1.106.2,
`responses/litellm_completion_transformation/transformation.py` and
`llms/anthropic/pass_through/adapters/transformation.py`), so that a model would answer a part of
what was asked. The tables hold what they carry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

from ..errors import BadRequest

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

MESSAGE_ROLES = ("user", "assistant", "system")
BLOCKS: Mapping[str, Collection[str]] = {
    "user": ("text", "image", "tool_result", "compaction"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking", "compaction"),
    "system": ("text",),
}
RESULT_BLOCKS = ("text", "image", "tool_reference")
IMAGE_SOURCES = {"base64": "data", "url": "url"}
"""Where the image stands, by the type of its source."""
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
    for where, item in _objects(items, "input"):
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


def check_messages(kwargs: Mapping[str, Any]) -> None:
    """A call of `/v1/messages`. Raises `BadRequest` that names the message or block."""
    _check_blocks(kwargs.get("system"), "system", BLOCKS["system"])
    messages = kwargs.get("messages")
    if not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    for where, message in _objects(messages, "messages"):
        role = message.get("role")
        _known(role, MESSAGE_ROLES, f"{where}.role")
        _check_blocks(message.get("content"), f"{where}.content", BLOCKS[str(role)])
    _check_tools(kwargs.get("tools"), kwargs.get("tool_choice"))


def _check_format(text: Any) -> None:
    form = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(form, Mapping):
        _known(form.get("type"), FORMATS, "text.format.type")


def _check_tools(tools: Any, choice: Any) -> None:
    for where, tool in _objects(tools or [], "tools"):
        if not isinstance(tool.get("name"), str):
            raise BadRequest(f"{where}.name must be a text", param=where)
    if not isinstance(choice, Mapping | None):
        raise BadRequest(
            "tool_choice must be an object, such as {'type': 'any'}", param="tool_choice"
        )


def _check_item(item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type") or "message"
    _known(kind, ITEMS, f"{where}.type")
    if kind == "message":
        _known(item.get("role") or "user", ROLES, f"{where}.role")
        _check_parts(item.get("content"), f"{where}.content", ITEM_PARTS)
    elif kind.endswith(("call_output", "_result")):
        if not item.get("call_id"):
            raise BadRequest(f"{where}.call_id is missing: send the call's", param=where)
        if isinstance(item.get("output"), list):
            _check_parts(item["output"], f"{where}.output", PARTS)


def _check_parts(content: Any, where: str, known: Collection[str]) -> None:
    if content is None or isinstance(content, str):
        return
    for at, part in _objects(content, where, texts=True):
        kind = part.get("type") or "text"
        _known(kind, known, f"{at}.type")
        if kind in TEXTS:
            _check_text(part, at)
        if kind == "input_image" and not part.get("image_url"):
            raise BadRequest(f"{at}.image_url is missing: send a data: or https: URL", param=at)


def _check_blocks(content: Any, where: str, known: Collection[str]) -> None:
    if content is None or isinstance(content, str):
        return
    for at, block in _objects(content, where):
        kind = block.get("type")
        _known(kind, known, f"{at}.type")
        if kind == "text":
            _check_text(block, at)
        elif kind == "image":
            _check_image(block.get("source"), f"{at}.source")
        elif kind == "tool_result":
            _check_blocks(block.get("content"), f"{at}.content", RESULT_BLOCKS)


def _check_image(source: Any, where: str) -> None:
    if not isinstance(source, Mapping):
        raise BadRequest(f"{where} must be an object", param=where)
    kind = source.get("type")
    _known(kind, IMAGE_SOURCES, f"{where}.type")
    place = IMAGE_SOURCES[str(kind)]
    if not isinstance(source.get(place), str) or not source[place]:
        raise BadRequest(f"{where}.{place} must be a text", param=where)


def _check_text(part: Mapping[str, Any], where: str) -> None:
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text must be a text", param=where)


def _objects(
    items: Any, where: str, *, texts: bool = False
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object of a list and its place in the request; `texts`: plain texts may stand there."""
    if not isinstance(items, list):
        raise BadRequest(
            f"{where} must be a text or a list, got {type(items).__name__}", param=where
        )
    for index, item in enumerate(items):
        at = f"{where}[{index}]"
        if isinstance(item, Mapping):
            yield at, item
        elif isinstance(item, BaseModel):  # a script gives back what it got
            yield at, item.model_dump()
        elif not (texts and isinstance(item, str)):
            raise BadRequest(f"{at} must be an object, got {type(item).__name__}", param=at)


def _known(value: Any, known: Collection[str], where: str) -> None:
    if value not in known:
        raise BadRequest(
            f"{where} is {value!r}, which is not supported: it must be one of {', '.join(known)}",
            param=where,
        )
