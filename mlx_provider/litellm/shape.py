"""Checks the types in a chat request before LiteLLM fails on them. It answers a message that is not
an object with a traceback (1.106.2, `validate_and_fix_openai_messages`), and drops such a tool
silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litellm.types.llms.openai import ValidUserMessageContentTypes
from pydantic import BaseModel

from ..chat.messages.foreign import foreign_text
from ..chat.messages.normalise import typed_index
from ..errors import BadRequest
from ..invalid import shown


def fit_parts(messages: Any) -> tuple[Any, list[str]]:
    """Messages with parts that LiteLLM accepts (1.106.2, `validate_chat_completion_user_messages`),
    and warnings. `video` is renamed. Other types become text, except in a message that a user has
    just typed, where they are refused."""
    if not isinstance(messages, list) or not messages:
        return messages, []
    typed, warnings = typed_index(messages), list[str]()
    fitted = [
        _with_parts(message, f"messages[{index}].content", None if index == typed else warnings)
        for index, message in enumerate(messages)
    ]
    return fitted, warnings


def _with_parts(message: Any, where: str, notes: list[str] | None) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    notes = notes if message.get("role") == "user" else None
    parts = [_part(part, f"{where}[{at}]", notes) for at, part in enumerate(content)]
    return message if parts == content else {**message, "content": parts}


def _part(part: Any, where: str, notes: list[str] | None) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "video":
        return {"type": "video_url", "video_url": part.get("video")}
    if notes is None or not isinstance(kind, str) or kind in ValidUserMessageContentTypes:
        return part
    notes.append(f"{where} is of type {kind!r}: a text takes its place")
    return {"type": "text", "text": foreign_text(part)}


def check_shape(kwargs: Mapping[str, Any]) -> None:
    """Raises `BadRequest` that names the message, part or tool."""
    _check_list(kwargs.get("messages"), "messages")
    for index, message in enumerate(kwargs.get("messages") or []):
        if isinstance(message, Mapping):
            _check_message(message, f"messages.{index}")
    _check_list(kwargs.get("tools"), "tools")
    for name in ("allowed_openai_params", "additional_drop_params"):
        _check_names(kwargs.get(name), name)
    _check_timeout(kwargs.get("timeout"))
    form = kwargs.get("response_format")
    if form is not None and not isinstance(form, Mapping | type):  # a script can pass a class
        raise BadRequest(
            f"response_format must be an object, got {type(form).__name__}", param="response_format"
        )


def _check_list(items: Any, name: str) -> None:
    if items is None:
        return
    if not isinstance(items, list):
        raise BadRequest(f"{name} must be a list, got {type(items).__name__}", param=name)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping | BaseModel):
            raise BadRequest(
                f"{name}.{index} must be an object, got {type(item).__name__}", param=name
            )


def _check_names(items: Any, name: str) -> None:
    if items is not None and not (
        isinstance(items, list | tuple) and all(isinstance(item, str) for item in items)
    ):
        raise BadRequest(f"{name} must be a list of texts, got {shown(items)}", param=name)


def _check_timeout(timeout: Any) -> None:
    if isinstance(timeout, str | list | dict):
        try:
            float(timeout)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise BadRequest(
                f"timeout must be a number of seconds, got {shown(timeout)}", param="timeout"
            ) from None


def _check_message(message: Mapping[str, Any], where: str) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadRequest(f"{where}.role must be a text, got {shown(role)}", param="messages")
    if not isinstance(content, str | list | None):
        kind = type(content).__name__
        raise BadRequest(f"{where}.content must be a text or a list, got {kind}", param="messages")
    _check_list(message.get("tool_calls"), f"{where}.tool_calls")
    for index, part in enumerate(content if isinstance(content, list) else []):
        if not isinstance(part, Mapping):
            raise BadRequest(f"{where}.content.{index} must be an object", param="messages")
        if role == "user" and part.get("type") not in ValidUserMessageContentTypes:
            raise BadRequest(
                f"{where}.content.{index}: unknown type {shown(part.get('type'))}, "
                f"known are {', '.join(ValidUserMessageContentTypes)}",
                param="messages",
            )
