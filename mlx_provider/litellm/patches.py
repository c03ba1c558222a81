"""Registers provider, hook and models with LiteLLM, and wraps its functions that lose our data or
waste time and have no hook (1.106.2 and 1.109.1; `docs/upstream.md` lists them)."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any
from weakref import ref

import litellm
from litellm import CustomLLM, CustomStreamWrapper, main
from litellm.constants import LITELLM_EMBEDDING_PROVIDERS_SUPPORTING_INPUT_ARRAY_OF_TOKENS
from litellm.main import TextCompletionStreamWrapper
from litellm.responses.litellm_completion_transformation.streaming_iterator import (
    LiteLLMCompletionStreamingIterator,
)
from litellm.responses.litellm_completion_transformation.transformation import (
    LiteLLMCompletionResponsesConfig,
)
from litellm.types.router import Deployment
from litellm.types.utils import Logprobs, TokenCountResponse

from ..client.connection import connect
from ..client.generation import REPLIES, Generation
from ..errors import EngineUnavailable, MLXProviderError, Overloaded
from ..protocol.requests import GenerateRequest
from ..wire.openai.request import Parameters, generate_requests
from . import model_info
from .errors import PROVIDER
from .fit import fit_chat, fit_messages
from .hook import DeploymentHook
from .streams import TEXT_LISTS, OurLogprobs

try:
    from litellm.llms.anthropic.messages.adapters.transformation import AnthropicAdapter
except ModuleNotFoundError:  # LiteLLM before 1.109
    from litellm.llms.anthropic.pass_through.adapters.transformation import AnthropicAdapter

WRAPPED = "mlx_wrapped"
"""Attribute of our wrappers: LiteLLM may import this module twice, as two modules."""
AUTHENTICATION = "litellm.proxy.auth.auth_exception_handler"
CHAT_PARAMETERS = ("reasoning_effort", "thinking", "user", "verbosity")
EMBEDDING_PARAMETERS = ("dimensions", "encoding_format", "user")
CREATED = "mlx_created"  # attribute of our streams
Original = Callable[..., Any]
KEY_REMEDY = (
    "send the proxy's key as `Authorization: Bearer KEY` or `x-api-key: KEY`. `mlx-provider up` "
    "prints it; for `mlx-provider init` it is LITELLM_MASTER_KEY in .env"
)
Message = MutableMapping[str, Any]


def register(handler: CustomLLM) -> None:
    """Register all parts, once. Scripts need the entry in `custom_provider_map`, which a proxy
    replaces by that of its YAML; both need the hook."""
    entries = litellm.custom_provider_map
    if not any(entry["provider"] == PROVIDER for entry in entries):
        entries.append({"provider": PROVIDER, "custom_handler": handler})
    litellm.utils.custom_llm_setup()
    hooks = [type(callback).__name__ for callback in litellm.callbacks]  # as `WRAPPED`: by name
    if DeploymentHook.__name__ not in hooks:
        litellm.logging_callback_manager.add_litellm_callback(DeploymentHook())
    for model, facts in model_info.DEMOS.items():
        model_info.add_to_map(model, facts)
    # For other providers the proxy converts token ids of embeddings to text by OpenAI's tokenizer
    # (1.106.2 and 1.109.1, `embeddings`).
    if f"{PROVIDER}/" not in LITELLM_EMBEDDING_PROVIDERS_SUPPORTING_INPUT_ARRAY_OF_TOKENS:
        LITELLM_EMBEDDING_PROVIDERS_SUPPORTING_INPUT_ARRAY_OF_TOKENS.append(f"{PROVIDER}/")
    install()


def install() -> None:
    """Wrap LiteLLM's functions. The wrappers are defined below, in this order."""
    wrap(main, "get_optional_params", _pass_chat_parameters)
    wrap(main, "get_optional_params_embeddings", _pass_embedding_parameters)
    wrap(Deployment, "__init__", _complete_deployment)
    wrap(CustomStreamWrapper, "__init__", _set_created)
    wrap(CustomStreamWrapper, "model_response_creator", _reuse_chunk)
    wrap(TextCompletionStreamWrapper, "convert_to_text_completion_object", _complete_text)
    bridge, stream = LiteLLMCompletionResponsesConfig, LiteLLMCompletionStreamingIterator
    wrap(bridge, "_extract_message_output_items", _add_logprobs)
    wrap(stream, "_transform_chat_completion_chunk_to_response_api_chunk", _add_chunk_logprobs)
    wrap(stream, "create_litellm_model_response", _add_stream_logprobs)
    proxy = model_info.proxy_server()
    if proxy is not None:
        wrap(proxy.app.router, "middleware_stack", end_replies)
    handler = getattr(sys.modules.get(AUTHENTICATION), "UserAPIKeyAuthExceptionHandler", None)
    if handler is not None:
        wrap(handler, "handle_authentication_error", partial(refuse_key, proxy=proxy))
    if hasattr(proxy, "count_request_tokens"):
        wrap(proxy, "count_request_tokens", partial(count_request_tokens, proxy=proxy))


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Calls of `owner.name` go to `around`, with the original as first argument. Idempotent."""
    original = getattr(owner, name)
    if hasattr(original, WRAPPED):
        return

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, WRAPPED, True)
    setattr(owner, name, wrapper)


def _pass_chat_parameters(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Pass on what LiteLLM refuses or drops for custom providers. Blocking calls run no hook."""
    if kwargs.get("custom_llm_provider") == PROVIDER:
        allowed = kwargs.get("allowed_openai_params") or ()
        kwargs["allowed_openai_params"] = [*allowed, *CHAT_PARAMETERS]
    return original(*args, **kwargs)


def _pass_embedding_parameters(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Pass on parameters that LiteLLM refuses. OpenAI's client always sends `encoding_format`."""
    if kwargs.get("custom_llm_provider") != PROVIDER:
        return original(*args, **kwargs)
    ours = {name: kwargs.pop(name, None) for name in EMBEDDING_PARAMETERS}
    return {**original(*args, **kwargs), **ours}


def _complete_deployment(original: Original, entry: Any, *args: Any, **kwargs: Any) -> None:
    """Add context and abilities to an entry, so that they are known before its model is used."""
    original(entry, *args, **kwargs)
    if entry.litellm_params.model.startswith(PROVIDER + "/"):
        model_info.complete_entry(entry)


def _set_created(original: Original, stream: Any, *args: Any, **kwargs: Any) -> None:
    """Give all chunks of a stream one time of creation, ours."""
    original(stream, *args, **kwargs)
    stream.created = getattr(stream.completion_stream, CREATED, stream.created)


def _reuse_chunk(original: Original, stream: Any, *args: Any, **kwargs: Any) -> Any:
    """Beside each of our chunks, LiteLLM creates another one that it does not use (1.108.7,
    `chunk_creator`), in a quarter of its time per chunk. Create one per stream, and return that."""
    unused = "provider_response_model" in (kwargs.get("hidden_params") or ())
    if not unused or "chunk" in kwargs or not hasattr(stream.completion_stream, CREATED):
        return original(stream, *args, **kwargs)
    stream.mlx_spare = getattr(stream, "mlx_spare", None) or original(stream, **kwargs)
    return stream.mlx_spare


def _complete_text(original: Original, stream: Any, chunk: Any) -> Any:
    """Add our log-probabilities to a chunk of text, and a text to the last chunk."""
    converted = original(stream, chunk)
    for choice, ours in zip(converted.choices, chunk["choices"], strict=False):
        if choice.text is None:
            choice.text = ""
        found = getattr(getattr(ours, "logprobs", None), TEXT_LISTS, None)
        if found is not None:
            choice.logprobs = Logprobs(**found)
    return converted


def _add_logprobs(
    original: Original, response: Any, choices: Any, *args: Any, **kwargs: Any
) -> Any:
    """Add our log-probabilities to a whole reply of the Responses API."""
    items = original(response, choices, *args, **kwargs)
    with_text = [choice for choice in choices if choice.message.content is not None]
    for item, choice in zip(items, with_text, strict=False):
        found = _logprobs(choice)
        # `made_here`, not the class, which may exist twice
        if found and item.type == "message" and getattr(choice.logprobs, "made_here", False):
            item.content[0].logprobs = found
    return items


def _add_chunk_logprobs(original: Original, stream: Any, chunk: Any) -> Any:
    """Add them to one event of its stream."""
    event = original(stream, chunk)
    ours = stream.custom_llm_provider == PROVIDER
    found = _logprobs(chunk.choices[0]) if ours and chunk.choices else []
    if found and getattr(event, "type", None) == "response.output_text.delta":
        event.logprobs = found
    return event


def _add_stream_logprobs(original: Original, stream: Any) -> Any:
    """Add them to the response at the end of its stream."""
    response = original(stream)
    chunks = stream.collected_chat_completion_chunks
    choices = [choice for chunk in chunks for choice in chunk["choices"][:1]]
    found = [t for choice in choices for t in (choice.get("logprobs") or {}).get("content") or []]
    if stream.custom_llm_provider == PROVIDER and response is not None and found:
        response.choices[0].logprobs = OurLogprobs(content=found)
    return response


def _logprobs(choice: Any) -> list[Any]:
    content = getattr(getattr(choice, "logprobs", None), "content", None) or []
    return [token.model_dump() for token in content]


async def end_replies(
    original: Original,
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """End the engine's requests of a client that disconnects. LiteLLM's iterators close their
    source only while they wait for it, and are in a reference cycle with it (1.108.7,
    `_aresponses_streaming_iterator`). `close` is synchronous, because anyio cancels each await."""
    disconnected = complete = False

    async def receive_next() -> Message:
        nonlocal disconnected
        message = await receive()
        disconnected |= message["type"] == "http.disconnect" and not complete
        return message

    async def send_next(message: Message) -> None:
        nonlocal complete
        complete = message["type"] == "http.response.body" and not message.get("more_body")
        await send(message)

    if scope["type"] != "http":
        await original(scope, receive, send)
        return
    replies: list[ref[Generation]] = []
    REPLIES.set(replies)
    try:
        await original(scope, receive_next, send_next)
    finally:
        if disconnected or not complete:
            for reply in filter(None, [reference() for reference in replies]):
                reply.close()


def refuse_key(original: Original, *args: Any, proxy: Any, **kwargs: Any) -> Any:
    """Answer 401 with the remedy to a wrong or missing key, if the proxy has no database, and 400
    to a refused parameter. LiteLLM answers 400 or 500, with a traceback in the log (1.106.2,
    `auth_exception_handler.py`). Raises, or calls `original`: it lets nobody in."""
    from fastapi import HTTPException
    from litellm.proxy._types import ProxyErrorTypes, ProxyException

    error = kwargs.get("e")
    has_status = isinstance(error, ProxyException | HTTPException | litellm.BudgetExceededError)
    kind = getattr(error, "type", None)
    unknown = kind == ProxyErrorTypes.no_db_connection
    missing = not kwargs.get("api_key") and (not has_status or kind == ProxyErrorTypes.auth_error)
    if proxy.prisma_client is not None or not (unknown or missing or isinstance(error, ValueError)):
        return original(*args, **kwargs)
    if not unknown and not missing:  # a parameter that a client may not set
        raise ProxyException(str(error), ProxyErrorTypes.auth_error, None, 400)
    message = f"{'Wrong' if unknown else 'No'} key: {KEY_REMEDY}"
    raise ProxyException(message, ProxyErrorTypes.auth_error, None, 401)


# -- token counts


async def count_request_tokens(
    original: Original, request: Any, *args: Any, proxy: Any, **kwargs: Any
) -> Any:
    """Count by the model's template and tokenizer. For Gemini's form, LiteLLM still estimates."""
    entry = None if request.contents else await _find_entry(proxy, request.model)  # Gemini's form
    if entry is None:
        return await original(request, *args, **kwargs)
    form = kwargs.get("messages_format", "openai")
    try:
        return await asyncio.to_thread(_count_tokens, entry, request, form)
    except (EngineUnavailable, Overloaded):  # LiteLLM's estimate, which is marked as such
        return await original(request, *args, **kwargs)
    except MLXProviderError as error:  # these routes convert no errors of providers
        from litellm.proxy._types import ProxyException

        kind = "invalid_request_error" if error.status < 500 else "internal_server_error"
        raise ProxyException(error.message, kind, error.param, error.status) from None


async def _find_entry(proxy: Any, model: str) -> Mapping[str, Any] | None:
    router, entry = proxy.llm_router, None
    with suppress(Exception):  # LiteLLM reports a model that its router does not find
        if hasattr(router, "select"):  # 1.109
            entry = await router.select(model, {})
        else:
            entry = await router.async_get_available_deployment(model=model, request_kwargs={})
    named = (entry or {}).get("litellm_params", {}).get("model", "")
    return entry if named.startswith(PROVIDER + "/") else None


def _count_tokens(entry: Mapping[str, Any], request: Any, form: str) -> TokenCountResponse:
    params, counted = entry["litellm_params"], _make_request(entry, request, form)
    return TokenCountResponse(
        total_tokens=connect(params.get("api_base"), params.get("api_key")).count(counted),
        request_model=request.model,
        model_used=counted.model,
        tokenizer_type=PROVIDER,
        count_source="provider",
    )


def _make_request(entry: Mapping[str, Any], request: Any, form: str) -> GenerateRequest:
    """The request to count, as the engine would run it. Raises `BadRequest`."""
    model = entry["litellm_params"]["model"].removeprefix(PROVIDER + "/")
    options = model_info.operator_options({"model_info": entry.get("model_info")})
    sender = {
        "model": model,
        "origin": model_info.chosen_by(entry, model),
        "options": model_info.engine_options(options),
    }
    if request.messages is None:
        return generate_requests(Parameters({}), sender, [request.prompt], text=True)[0]
    anthropic = form == "anthropic"
    messages, tools = _convert_anthropic(request, model) if anthropic else _convert_chat(request)
    params = Parameters({"tools": tools})
    return generate_requests(params, sender, messages, continues=anthropic)[0]


def _convert_anthropic(request: Any, model: str) -> tuple[Any, Any]:
    given = {"messages": request.messages, "system": request.system, "tools": request.tools}
    fitted = dict(given)
    fit_messages(fitted)  # may add parameters
    counted = {name: fitted[name] for name in given if fitted[name]} | {"max_tokens": 1}
    converted, _ = AnthropicAdapter().translate_completion_input_params_with_tool_mapping(
        {"model": model, **counted}, custom_llm_provider=PROVIDER
    )
    return converted.get("messages"), converted.get("tools")


def _convert_chat(request: Any) -> tuple[Any, Any]:
    fitted = {"messages": request.messages, "tools": request.tools}
    fit_chat(fitted)  # changes messages, checks tools
    head = [{"role": "system", "content": request.system}] if request.system else []
    tools = request.tools or []
    if not all("function" in tool for tool in tools):
        bridge = LiteLLMCompletionResponsesConfig
        tools, _ = bridge.transform_responses_api_tools_to_chat_completion_tools(tools)
        tools = [tool for tool in tools if tool["type"] == "function"]
    return head + fitted["messages"], tools
