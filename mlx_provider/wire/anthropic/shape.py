"""Checks the shape of a request of the Messages API. What no model can see is refused in the system
prompt and in a message that a user has just typed; in an earlier turn it becomes text
(`chat.messages.foreign`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import BadRequest
from ..objects import check_kind, check_known, check_text, objects

ROLES = ("user", "assistant", "system")
BLOCKS: Mapping[str, Collection[str]] = {
    "user": ("text", "image", "tool_result", "compaction"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking", "compaction"),
    "system": ("text",),
}
RESULT_BLOCKS = ("text", "image", "tool_reference")
IMAGE_SOURCES = {"base64": "data", "url": "url"}
"""By the type of an image's source: the field with the image."""


def check_messages(given: Mapping[str, Any]) -> None:
    """Raises `BadRequest` that names the message, block or tool."""
    _check_blocks(given.get("system"), "system", BLOCKS["system"])
    messages = given.get("messages")
    if not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    listed = [*objects(messages, "messages")]
    typed = is_typed([message for _, message in listed[-2:]])
    for at, (where, message) in enumerate(listed, 1):
        role = message.get("role")
        check_known(role, ROLES, f"{where}.role")
        strict = role == "system" or (typed and at == len(listed))
        _check_blocks(
            message.get("content"), f"{where}.content", BLOCKS[str(role)] if strict else None
        )
    _check_tools(given.get("tools"), given.get("tool_choice"))


def is_typed(last: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is a user's, and neither holds results nor follows them."""
    return last[-1].get("role") == "user" and not any(map(_has_results, last))


def _has_results(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    return any(isinstance(b, Mapping) and b.get("type") == "tool_result" for b in blocks)


def _check_tools(tools: Any, choice: Any) -> None:
    for where, tool in objects(tools or [], "tools"):
        if not isinstance(tool.get("name"), str):
            raise BadRequest(f"{where}.name must be a text", param=where)
    if not isinstance(choice, Mapping | None):
        raise BadRequest(
            "tool_choice must be an object, such as {'type': 'any'}", param="tool_choice"
        )


def _check_blocks(content: Any, where: str, known: Collection[str] | None) -> None:
    """`known`: types that a model can take; `None`: others become text."""
    if content is None or isinstance(content, str):
        return
    for at, block in objects(content, where):
        kind = block.get("type")
        if known is None:
            check_kind(kind, f"{at}.type")
        else:
            check_known(kind, known, f"{at}.type")
        if kind == "text":
            check_text(block, at)
        elif kind == "image" and known is not None:
            check_image(block, at)
        elif kind == "tool_result":
            _check_blocks(block.get("content"), f"{at}.content", None)


def check_image(block: Mapping[str, Any], where: str) -> None:
    source, where = block.get("source"), f"{where}.source"
    if not isinstance(source, Mapping):
        raise BadRequest(f"{where} must be an object", param=where)
    kind = source.get("type")
    check_known(kind, IMAGE_SOURCES, f"{where}.type")
    place = IMAGE_SOURCES[str(kind)]
    if not isinstance(source.get(place), str) or not source[place]:
        raise BadRequest(f"{where}.{place} must be a text", param=where)
