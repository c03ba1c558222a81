"""Parameters of the Messages API to the engine's request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import BadRequest
from ...invalid import shown
from ...protocol.requests import GenerateRequest
from ..openai.form import AnswerForm
from ..openai.names import SCHEMA, names_of
from ..openai.parameters import Parameters
from ..openai.request import generate_requests
from ..places import Places
from .messages import chat_messages
from .shape import check_messages
from .tools import chat_tools

CHATS_OWN = (
    "function_call",
    "functions",
    "logprobs",
    "max_completion_tokens",
    "n",
    "parallel_tool_calls",
    "response_format",
    "stop",
    "top_logprobs",
    "user",
)
"""Parameters of chat for which the reply has no room, or which have another name here."""


def message_request(
    body: Mapping[str, Any], sender: Mapping[str, Any], *, counted: bool = False
) -> tuple[GenerateRequest, Places]:
    """The request, with parameters of chat where Anthropic has none, and the names of its parts.
    `counted`: only its prompt is wanted, which needs no `max_tokens`. Raises `BadRequest` that
    names the parameter."""
    check_messages(body)
    params = Parameters({name: value for name, value in body.items() if name != "model"})
    if not counted and body.get("max_tokens") is None:
        raise BadRequest("max_tokens is missing", param="max_tokens")
    for name in CHATS_OWN:
        params.choice(name, (), "the Messages API has no such parameter")
    params.take("cache_control")  # every prompt is cached, as far as there is room
    messages, places = chat_messages(params.take("system"), params.take("messages"))
    values = {
        **chat_tools(params),
        **answer_format(params),
        "stop": params.take("stop_sequences"),
        "user": _session(params.mapping("metadata")),
        "prompt_cache_retention": "24h" if retains(body) else None,
    }
    given = {name: value for name, value in values.items() if value is not None}
    model = {**sender, "model": body.get("model")}
    given = params.rest() | given
    names = Places(_names(body) | places).before(names_of(given))
    with names.naming():
        (request,) = generate_requests(
            Parameters(given), model, messages, AnswerForm(), continues=True
        )
    return request, names


def _names(body: Mapping[str, Any]) -> dict[str, str]:
    config = body.get("output_config") or {}
    form = "output_config.format" if config.get("format") else "output_format"
    names = {
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "response_format": form,
        "response_format.json_schema": form,
        SCHEMA: f"{form}.schema",
        "stop": "stop_sequences",
    }
    if config.get("effort") is not None:
        names["reasoning_effort"] = "output_config.effort"
    for at in range(len(body.get("tools") or [])):
        own = f"tools[{at}]"
        names |= {f"{own}.function": own, f"{own}.function.parameters": f"{own}.input_schema"}
    return names


def answer_format(params: Parameters) -> dict[str, Any]:
    """From `output_config` or the older `output_format`."""
    config = params.mapping("output_config")
    form = config.get("format") or params.take("output_format")
    fields = {"reasoning_effort": config.get("effort")}
    if form is None:
        return fields
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise BadRequest(
            f"output_config.format must be of type json_schema, got {shown(form)}",
            param="output_config",
        )
    schema = {"name": "output", "schema": form.get("schema")}
    return fields | {"response_format": {"type": "json_schema", "json_schema": schema}}


def cache_marks(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = [message.get("content") for message in body["messages"]]
    lists = [body.get("system"), body.get("tools"), *messages]
    blocks = [body, *(block for each in lists if isinstance(each, list) for block in each)]
    marks = [block.get("cache_control") for block in blocks if isinstance(block, Mapping)]
    return [mark for mark in marks if isinstance(mark, Mapping)]


def retains(body: Mapping[str, Any]) -> bool:
    """Whether a part of the prompt asks for the longer lifetime."""
    return any(mark.get("ttl") == "1h" for mark in cache_marks(body))


def _session(metadata: Mapping[str, Any]) -> str | None:
    """Claude Code names the session in its user id: as JSON, or at its end."""
    user = metadata.get("user_id")
    if not isinstance(user, str):
        return None
    try:
        named = json.loads(user)
    except (ValueError, RecursionError):
        return user.rpartition("_session_")[2]
    found = named.get("session_id") if isinstance(named, dict) else None
    return found if isinstance(found, str) else user
