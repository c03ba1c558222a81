"""Token counts of the proxy's routes, by the model's own template and tokenizer. LiteLLM asks only
built-in providers, and estimates for all others (1.106.2 and 1.109.1,
`proxy_server._get_provider_token_counter`). `/v1/messages/count_tokens`, `/v1/responses/
input_tokens` and `/utils/token_counter` call one function, which has no hook."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from litellm.responses.litellm_completion_transformation.transformation import (
    LiteLLMCompletionResponsesConfig,
)
from litellm.types.utils import TokenCountResponse
from pydantic import ValidationError

from ..client.generation import EngineClient
from ..errors import EngineUnavailable, MLXProviderError, Overloaded
from ..invalid import bad_request
from ..protocol.requests import GenerateRequest
from ..wire.anthropic.tools import chat_tools, known_members
from ..wire.openai.custom_tools import as_functions
from ..wire.openai.parameters import Parameters
from ..wire.openai.prefill_message import split_prefill_mark
from .bridged import fit_messages
from .errors import PROVIDER
from .operator import chosen_by, engine_options, operator_options
from .shape import check_shape, fit_parts

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
