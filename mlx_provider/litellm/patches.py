"""Wrappers of LiteLLM's functions that would lose data and have no hook. For 1.106.2 and 1.109.1.
`docs/upstream.md` lists them with their tests.

Registers the provider, its hook and the abilities of the shipped model in LiteLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

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
from litellm.types.utils import Logprobs

from ..client.connection import connect
from .counting import count_request_tokens
from .errors import PROVIDER
from .hook import DeploymentHook, refuse_key
from .model_info import DEMOS, describe, enter
from .objects import TEXT_LISTS, OurLogprobs

WRAPPED = "mlx_wrapped"
"""Attribute of a wrapped function. By name: LiteLLM may run a handler's module twice, as two
modules."""
PROXY = "litellm.proxy.proxy_server"
AUTHENTICATION = "litellm.proxy.auth.auth_exception_handler"
ADMITTED = ("reasoning_effort", "thinking", "user", "verbosity")
DELIVERED = ("dimensions", "encoding_format", "user")
CREATED = "mlx_created"
"""Attribute of our streams: Unix seconds."""

Original = Callable[..., Any]


def install() -> None:
    """Idempotent."""
    wrap(main, "get_optional_params", _admit)
    wrap(main, "get_optional_params_embeddings", _deliver)
    wrap(litellm, "get_model_cost_map", _keep_entries)
    wrap(Deployment, "__init__", _describe)
    wrap(CustomStreamWrapper, "__init__", _share_created)
    wrap(TextCompletionStreamWrapper, "convert_to_text_completion_object", _complete_text)
    bridge, stream = LiteLLMCompletionResponsesConfig, LiteLLMCompletionStreamingIterator
    wrap(bridge, "_extract_message_output_items", _show_logprobs)
    wrap(stream, "_transform_chat_completion_chunk_to_response_api_chunk", _stream_logprobs)
    wrap(stream, "create_litellm_model_response", _collect_logprobs)
    proxy = sys.modules.get(PROXY)
    if hasattr(proxy, "count_request_tokens"):
        wrap(proxy, "count_request_tokens", partial(count_request_tokens, proxy, connect))
    handler = getattr(sys.modules.get(AUTHENTICATION), "UserAPIKeyAuthExceptionHandler", None)
    if handler is not None:
        wrap(handler, "handle_authentication_error", partial(refuse_key, proxy))


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Calls of `owner.name` go to `around`, with the original as first argument. Idempotent."""
    original = getattr(owner, name)
    if hasattr(original, WRAPPED):
        return

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, WRAPPED, True)
    setattr(owner, name, wrapped)


def _admit(original: Original, *args: Any, **given: Any) -> Any:
    """Deliver parameters that LiteLLM lets through for OpenAI's own models. For custom providers it
    refuses or drops them, and does not call a handler's `get_supported_openai_params`. Its hook for
    deployments runs only on asynchronous calls."""
    if given.get("custom_llm_provider") == PROVIDER:
        given["allowed_openai_params"] = [*(given.get("allowed_openai_params") or ()), *ADMITTED]
    return original(*args, **given)


def _deliver(original: Original, *args: Any, **given: Any) -> Any:
    """Deliver OpenAI's parameters of embeddings. LiteLLM refuses or drops them for custom
    providers, even those that a call allows by name; OpenAI's client always sends an
    `encoding_format`."""
    if given.get("custom_llm_provider") != PROVIDER:
        return original(*args, **given)
    ours = {name: given.pop(name, None) for name in DELIVERED}
    return {**original(*args, **given), **ours}


def _keep_entries(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Add our entries to every new map of models. LiteLLM's own tests begin with
    `litellm.model_cost = litellm.get_model_cost_map(...)`."""
    prefix = f"{PROVIDER}/"
    ours = {name: own for name, own in litellm.model_cost.items() if name.startswith(prefix)}
    return {**original(*args, **kwargs), **ours}


def _describe(original: Original, entry: Any, *args: Any, **kwargs: Any) -> None:
    """LiteLLM makes a `Deployment` of every entry, from a config, a database or a script's
    router."""
    original(entry, *args, **kwargs)
    if entry.litellm_params.model.startswith(PROVIDER + "/"):
        describe(entry)


def _share_created(original: Original, stream: Any, *args: Any, **kwargs: Any) -> None:
    """LiteLLM makes the last chunks itself and reads the clock again."""
    original(stream, *args, **kwargs)
    stamp = getattr(stream.completion_stream, CREATED, None)
    if stamp is not None:
        stream.created = stamp


def _complete_text(original: Original, stream: Any, chunk: Any) -> Any:
    """Copy log-probabilities to the chunks of a text stream, and give its last chunk a text:
    LiteLLM makes them without either."""
    converted = original(stream, chunk)
    for choice, ours in zip(converted.choices, chunk["choices"], strict=False):
        if choice.text is None:
            choice.text = ""
        found = getattr(getattr(ours, "logprobs", None), TEXT_LISTS, None)
        if found is not None:
            choice.logprobs = Logprobs(**found)
    return converted


def _show_logprobs(
    original: Original, response: Any, choices: Any, *args: Any, **given: Any
) -> Any:
    """LiteLLM makes the messages of a response without log-probabilities."""
    items = original(response, choices, *args, **given)
    said = [choice for choice in choices if choice.message.content is not None]
    for item, choice in zip(items, said, strict=False):
        found = _logprobs(choice)
        # By name, as `WRAPPED`.
        if found and item.type == "message" and getattr(choice.logprobs, "ours", False):
            item.content[0].logprobs = found
    return items


def _stream_logprobs(original: Original, stream: Any, chunk: Any) -> Any:
    event = original(stream, chunk)
    ours = stream.custom_llm_provider == PROVIDER
    found = _logprobs(chunk.choices[0]) if ours and chunk.choices else []
    if found and getattr(event, "type", None) == "response.output_text.delta":
        event.logprobs = found
    return event


def _collect_logprobs(original: Original, stream: Any) -> Any:
    """Give the response at the end of a stream the log-probabilities of its chunks."""
    response = original(stream)
    chunks = [
        chunk["choices"][0] for chunk in stream.collected_chat_completion_chunks if chunk["choices"]
    ]
    found = [
        token for each in chunks for token in (each.get("logprobs") or {}).get("content") or []
    ]
    if stream.custom_llm_provider == PROVIDER and response is not None and found:
        response.choices[0].logprobs = OurLogprobs(content=found)
    return response


def _logprobs(choice: Any) -> list[Any]:
    content = getattr(getattr(choice, "logprobs", None), "content", None) or []
    return [token.model_dump() for token in content]


def register(handler: CustomLLM) -> None:
    """Idempotent. A proxy's YAML later replaces `custom_provider_map`: the map serves scripts, the
    hook both. Compared by class name, because LiteLLM can import a handler's module twice."""
    entries = litellm.custom_provider_map
    if not any(entry["provider"] == PROVIDER for entry in entries):
        entries.append({"provider": PROVIDER, "custom_handler": handler})
    litellm.utils.custom_llm_setup()
    if not any(
        type(callback).__name__ == DeploymentHook.__name__ for callback in litellm.callbacks
    ):
        litellm.logging_callback_manager.add_litellm_callback(DeploymentHook())
    for model, facts in DEMOS.items():
        enter(model, facts)
    _take_token_ids()
    install()


def _take_token_ids() -> None:
    """Let the proxy pass token ids for embeddings. For providers outside this list it converts them
    to text by OpenAI's tokenizer (1.106.2 and 1.109.1, `embeddings`)."""
    known = LITELLM_EMBEDDING_PROVIDERS_SUPPORTING_INPUT_ARRAY_OF_TOKENS
    if f"{PROVIDER}/" not in known:
        known.append(f"{PROVIDER}/")
