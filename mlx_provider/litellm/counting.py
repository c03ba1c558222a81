"""Checks the types in a chat request before LiteLLM fails on them. It answers a message that is not
an object with a traceback (1.106.2, `validate_and_fix_openai_messages`), and drops such a tool
silently.

Token counts of the proxy's routes, by the model's own template and tokenizer. LiteLLM asks only
built-in providers, and estimates for all others (1.106.2 and 1.109.1,
`proxy_server._get_provider_token_counter`). `/v1/messages/count_tokens`, `/v1/responses/
input_tokens` and `/utils/token_counter` call one function, which has no hook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from litellm.responses.litellm_completion_transformation.transformation import (
    LiteLLMCompletionResponsesConfig,
)
from litellm.types.llms.openai import ValidUserMessageContentTypes
from litellm.types.utils import TokenCountResponse
from pydantic import BaseModel, ValidationError

from ..chat.messages.foreign import foreign_text
from ..chat.messages.normalise import typed_index
from ..client.generation import EngineClient
from ..errors import BadRequest, EngineUnavailable, MLXProviderError, Overloaded
from ..invalid import bad_request, shown
from ..protocol.requests import GenerateRequest
from ..wire.anthropic.request import chat_tools, known_members
from ..wire.openai.parameters import Parameters
from ..wire.openai.request import split_prefill_mark
from ..wire.openai.tools import as_functions
from .bridged import fit_messages
from .errors import PROVIDER
from .model_info import chosen_by, engine_options, operator_options


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


try:
    from litellm.llms.anthropic.messages.adapters.transformation import AnthropicAdapter
except ModuleNotFoundError:  # LiteLLM before 1.109
    from litellm.llms.anthropic.pass_through.adapters.transformation import AnthropicAdapter

Connect = Callable[[str | None, str | None], EngineClient]


async def count_request_tokens(
    proxy: Any,
    connect: Connect,
    original: Callable[..., Any],
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Counts other providers' models with LiteLLM's `original`."""
    entry = None if request.contents else await _entry(proxy, request.model)
    if entry is None:
        return await original(request, *args, **kwargs)
    form = kwargs.get("messages_format", "openai")
    try:
        return await asyncio.to_thread(_counted, connect, entry, request, form)
    except (EngineUnavailable, Overloaded):  # LiteLLM's estimate, which is marked as such
        return await original(request, *args, **kwargs)
    except MLXProviderError as error:
        raise _refusal(error) from None


async def _entry(proxy: Any, model: str) -> Mapping[str, Any] | None:
    """`None`: the model is another provider's."""
    router, entry = proxy.llm_router, None
    with suppress(Exception):  # LiteLLM reports a model that its router does not find
        if hasattr(router, "select"):  # 1.109
            entry = await router.select(model, {})
        else:
            entry = await router.async_get_available_deployment(model=model, request_kwargs={})
    named = (entry or {}).get("litellm_params", {}).get("model", "")
    return entry if named.startswith(PROVIDER + "/") else None


def _counted(
    connect: Connect, entry: Mapping[str, Any], request: Any, form: str
) -> TokenCountResponse:
    params = entry["litellm_params"]
    asked = _request(entry, request, form)
    count = connect(params.get("api_base"), params.get("api_key")).count(asked)
    return TokenCountResponse(
        total_tokens=count,
        request_model=request.model,
        model_used=asked.model,
        tokenizer_type=PROVIDER,
        count_source="provider",
    )


def _refusal(error: MLXProviderError) -> Exception:
    """These routes convert no errors of providers: the error must be the proxy's own class."""
    from litellm.proxy._types import ProxyException

    kind = "invalid_request_error" if error.status < 500 else "internal_server_error"
    made: Exception = ProxyException(
        message=error.message, type=kind, param=error.param, code=error.status
    )
    return made


def _request(entry: Mapping[str, Any], request: Any, form: str) -> GenerateRequest:
    """As the engine would run it. Raises `BadRequest`."""
    model = entry["litellm_params"]["model"].removeprefix(PROVIDER + "/")
    given: Mapping[str, Any] = {"prompt": request.prompt}
    if request.messages is not None:
        given = _of_messages(request, model) if form == "anthropic" else _of_chat(request)
    sent = {name: value for name, value in given.items() if value or name == "continues"}
    try:
        return GenerateRequest(
            model=model,
            origin=chosen_by(entry, model),
            options=engine_options(operator_options({"model_info": entry.get("model_info")})),
            **sent,
        )
    except ValidationError as error:
        raise bad_request(error, flat=True) from None


def _of_messages(request: Any, model: str) -> Mapping[str, Any]:
    given = {"messages": request.messages, "system": request.system, "tools": request.tools}
    fit_messages(given)
    chat_tools(Parameters({"tools": request.tools}))
    given["tools"] = [known_members(tool) for tool in request.tools or []]
    asked = {name: value for name, value in given.items() if value} | {"max_tokens": 1}
    made, _ = AnthropicAdapter().translate_completion_input_params_with_tool_mapping(
        {"model": model, **asked}, custom_llm_provider=PROVIDER
    )
    return {name: made.get(name) for name in ("messages", "tools")}


def _of_chat(request: Any) -> Mapping[str, Any]:
    """Tools can have the form of the Responses API."""
    messages, continues = split_prefill_mark(fit_parts(request.messages)[0])
    check_shape({"messages": messages, "tools": request.tools})
    if request.system:
        messages = [{"role": "system", "content": request.system}, *messages]
    tools = request.tools or []
    if not all({"function", "custom"} & tool.keys() for tool in tools):
        bridge = LiteLLMCompletionResponsesConfig
        tools, _ = bridge.transform_responses_api_tools_to_chat_completion_tools(tools)
        tools = [tool for tool in tools if tool["type"] == "function"]
    fields, _ = as_functions(tools)
    return {"messages": messages, **fields, "continues": continues}
