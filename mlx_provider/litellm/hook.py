"""Checks and changes requests before LiteLLM checks and dispatches them, and changes replies."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import litellm
from fastapi import HTTPException
from litellm.constants import STREAM_SSE_KEEPALIVE_PING_BYTES
from litellm.exceptions import ContextWindowExceededError
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy._types import ProxyException
from litellm.responses.litellm_completion_transformation.streaming_iterator import (
    LiteLLMCompletionStreamingIterator,
)
from litellm.types.utils import CallTypes

from ..errors import BadRequest, ContextTooLong, wrong_part
from ..wire.openai.request import prompt_list
from . import call, fit, streams
from .errors import PROVIDER, LiteLLMErrors, check_served, is_context_full
from .model_info import proxy_server

HIJACKED_WORDS = (
    "replicate", "clarifai", "ft:babbage-002", "ft:davinci-002", "ft:gpt-3.5-turbo",
)  # fmt: skip
HIJACKED_LISTS = (
    "clarifai_models", "ovhcloud_models", "petals_models", "replicate_models", "snowflake_models",
)  # fmt: skip
"""By these parts of a model's name, or if one of these lists of LiteLLM has it, LiteLLM dispatches
to a cloud before it looks for custom providers (1.106.2, main.py `completion`)."""
EXTRA_SILENCE = 0.25
"""Seconds by which a bridge's heartbeats come later than chat's: it learns the id of the response
from the first chunk of chat, perhaps a heartbeat."""
ANNOUNCEMENT = ("response.created", "response.in_progress")


class DeploymentHook(CustomLogger):
    """Callbacks of LiteLLM for every asynchronous call, from the moment when its deployment is
    chosen. Calls of other providers pass unchanged."""

    async def async_pre_call_deployment_hook(
        self, kwargs: dict[str, Any], call_type: Any
    ) -> dict[str, Any] | None:
        """The arguments for our handler; `None`: another provider's call. Raises LiteLLM's
        `BadRequestError` for a call that is not served, or of which LiteLLM would lose a part."""
        model = kwargs.get("model") or ""
        prefixed = model.startswith(PROVIDER + "/")
        if not prefixed and kwargs.get("custom_llm_provider") != PROVIDER:
            return None
        with LiteLLMErrors(model):
            _check_body(kwargs, call_type)
            await _fit(kwargs, call_type)
        if prefixed:
            # A client's body must not send a local deployment's request to a cloud.
            kwargs["custom_llm_provider"] = PROVIDER
            bare = model.removeprefix(PROVIDER + "/")
            if hijacked(bare):
                kwargs["model"] = f"{PROVIDER}/{call.encode_model(bare)}"
        call.carry_params(kwargs)
        return kwargs

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> Any:
        """The error for the client of the proxy; `None`: the original one."""
        return ContextFull(original_exception) if is_context_full(original_exception) else None

    async def async_post_call_success_hook(
        self, data: dict[str, Any], user_api_key_dict: Any, response: Any
    ) -> Any:
        """The reply; on /v1/messages, with the stop reason and stop string that were kept."""
        return call.with_ending(data.get("litellm_logging_obj"), response)

    async def async_post_call_response_headers_hook(
        self,
        data: dict[str, Any],
        user_api_key_dict: Any,
        response: Any,
        request_headers: dict[str, str] | None = None,
    ) -> dict[str, str] | None:
        return call.warning_headers(data.get("litellm_logging_obj"))

    def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncIterator[Any]:
        entry = request_data.get("deployment")
        if entry is None or not entry.litellm_params.model.startswith(PROVIDER + "/"):
            return response  # type: ignore[no-any-return]
        logging = request_data.get("litellm_logging_obj")
        return complete_stream(response, user_api_key_dict.request_route or "", logging)


def _check_body(kwargs: dict[str, Any], call_type: Any) -> None:
    """Raise `BadRequest` if a client of the proxy sends its own key without an address that the
    operator permits: LiteLLM would use it in place of the operator's (1.106.2,
    `_handle_clientside_credential`). Also if it marks a chat request as a text completion."""
    body = (kwargs.get("proxy_server_request") or {}).get("body") or {}
    has_own_key = "original_model_id" in (kwargs.get("model_info") or {})
    if body and has_own_key and not {"api_base", "base_url"} & set(body):
        raise wrong_part("api_key", "cannot be sent: the operator sets the engine's")
    if "text_completion" in body and call_type != CallTypes.atext_completion:
        raise BadRequest("unknown parameter: text_completion", param="text_completion")


async def _fit(kwargs: dict[str, Any], call_type: Any) -> None:
    check_served(call_type)
    warnings: Sequence[str] = ()
    if call_type == CallTypes.acompletion:
        warnings = fit.fit_chat(kwargs)
    elif call_type == CallTypes.aresponses:
        warnings = fit.fit_responses(kwargs)
        await check_history(kwargs)
    elif call_type == CallTypes.anthropic_messages:
        warnings = fit.fit_messages(kwargs)
    elif call_type == CallTypes.atext_completion:
        call.carry_prompts(kwargs)
    elif call_type == CallTypes.aembedding:
        kwargs["input"] = prompt_list(kwargs.get("input"), "input")
    call.keep_warnings(kwargs.get("litellm_logging_obj"), warnings)


async def check_history(kwargs: Mapping[str, Any]) -> None:
    """Raises `BadRequest` if LiteLLM will find no conversation of `previous_response_id`. It would
    continue without it (1.106.2, `ResponsesSessionHandler`)."""
    response_id, found = kwargs.get("previous_response_id"), None
    if not response_id:
        return
    if getattr(proxy_server(), "prisma_client", None) is not None:
        from litellm.responses.litellm_completion_transformation import session_handler

        handler = session_handler.ResponsesSessionHandler
        find = handler.get_chat_completion_message_history_for_previous_response_id
        found = (await find(response_id)).get("messages")
    if not found:
        raise BadRequest(
            "previous_response_id: no messages are stored for this response; send the whole "
            "conversation as input, or let LiteLLM store responses (a database, and "
            "store_prompts_in_spend_logs: true under general_settings)",
            param="previous_response_id",
        )


def hijacked(model: str) -> bool:
    """Whether LiteLLM would take a model of this name for one of a cloud."""
    return any(word in model for word in HIJACKED_WORDS) or any(
        model in getattr(litellm, name, ()) for name in HIJACKED_LISTS
    )


class _Plain(HTTPException):
    """An `HTTPException` with a fixed status: `ProxyException` passes it only the message."""

    def __init__(self, *args: object) -> None:
        Exception.__init__(self, *args)
        self.status_code = ContextTooLong.status
        self.detail = str(args[0])


class ContextFull(ProxyException, _Plain):
    """The error in the form that clients of the proxy recognise, in place of `code: "400"`
    (1.106.2, `ProxyException.to_dict`). LiteLLM accepts an exception of a callback if it is an
    `HTTPException`, and raises it unchanged if it is a `ProxyException`."""

    def __init__(self, error: ContextWindowExceededError) -> None:
        super().__init__(  # type: ignore[call-arg]  # LiteLLM's, which has no types
            message=error.message,
            type="invalid_request_error",
            param="messages",
            code=ContextTooLong.status,
        )
        self.body = error.body

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "code": ContextTooLong.code}


def complete_stream(chunks: AsyncIterator[Any], route: str, logging: Any) -> AsyncIterator[Any]:
    """A bridge's stream with heartbeats, and on /v1/messages with the stop reason. Any other stream
    is returned unchanged. Bridges drop chat's heartbeats: empty deltas (1.106.2 and 1.109.1)."""
    seconds = streams.SILENCE + EXTRA_SILENCE
    if route.endswith("/messages"):  # as LiteLLM writes them (1.106.2), but less often
        ping = (STREAM_SSE_KEEPALIVE_PING_BYTES,)
        return add_heartbeats(chunks, seconds, lambda: ping, partial(call.with_ending, logging))
    source = getattr(chunks, "_billing_source", chunks)
    if isinstance(source, LiteLLMCompletionStreamingIterator):
        first = Announcements(source)
        return add_heartbeats(chunks, seconds, first.beat, first.forward)
    return chunks


class Announcements:
    """The first events of a stream of the Responses API. A response is announced once, by us with
    the first heartbeat, or by the bridge."""

    def __init__(self, source: LiteLLMCompletionStreamingIterator) -> None:
        self._source = source
        self._announced: Literal["", "by us", "by the bridge"] = ""

    def beat(self) -> Iterable[Any]:
        """The events of a heartbeat."""
        if not self._announced:
            self._announced = "by us"
            yield self._source.create_response_created_event()
        yield self._source.create_response_in_progress_event()

    def forward(self, chunk: Any) -> Any:
        """The bridge's event; `None`: it announces again what was announced by us."""
        if getattr(chunk, "type", None) not in ANNOUNCEMENT:
            return chunk
        self._announced = self._announced or "by the bridge"
        return chunk if self._announced == "by the bridge" else None


async def add_heartbeats(
    chunks: AsyncIterator[Any],
    seconds: float | None,
    beat: Callable[[], Iterable[Any]],
    forward: Callable[[Any], Any],
) -> AsyncGenerator[Any, None]:
    """`beat`: events after `seconds` of silence. `forward`: the chunk to send; `None`: nothing."""
    coming = asyncio.ensure_future(anext(chunks))
    try:
        while True:
            await asyncio.wait({coming}, timeout=seconds)
            if not coming.done():
                for event in beat():
                    yield event
                continue
            try:
                chunk = coming.result()
            except StopAsyncIteration:
                return
            if (sent := forward(chunk)) is not None:
                yield sent
            coming = asyncio.ensure_future(anext(chunks))
    finally:
        coming.cancel()
        await asyncio.wait({coming})
        if not coming.cancelled():
            coming.exception()
