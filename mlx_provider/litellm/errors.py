"""Converts errors to LiteLLM's classes, which decide status, retries, fallbacks and cooldowns.

    ContextTooLong        ContextWindowExceededError  400  `context_window_fallbacks`
    BodyTooLarge          BadRequestError             413  never retried
    BadRequest            BadRequestError             400  never retried
    ModelNotFound         NotFoundError               404  never retried, never cooled down
    RequestTimedOut       Timeout                     408
    Overloaded            RateLimitError              429  retried; traffic moves to siblings
    EngineUnavailable     ServiceUnavailableError     503  retried, fallbacks; after `retry_after`
                                                           seconds, if it is set
    Unauthorized          ServiceUnavailableError     503  401 would mean the client's own key
    PluginError           UnprocessableEntityError    422  never retried, never cooled down
    other errors          InternalServerError         500  retried

An exception that is not LiteLLM's reaches streaming clients as a Python traceback
(litellm 1.106.2, `proxy_server.async_data_generator`), so the handler raises only LiteLLM's.

Refuses calls that mlx models do not serve, with an error of one line. LiteLLM would answer with
a traceback (`'mlx' is not a valid LlmProviders`), or send the text to another server, whose 404
would disable the chat model for seconds (1.106.2, `amoderation`).
"""

from __future__ import annotations

import logging
from math import ceil
from typing import Any, NoReturn

import httpx
from litellm.exceptions import (
    LITELLM_EXCEPTION_TYPES,
    BadRequestError,
    ContextWindowExceededError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
    ServiceUnavailableError,
    Timeout,
    UnprocessableEntityError,
)
from litellm.types.utils import CallTypes

from ..errors import (
    BadRequest,
    BodyTooLarge,
    ContextTooLong,
    EngineUnavailable,
    MLXProviderError,
    ModelNotFound,
    Overloaded,
    PluginError,
    RequestTimedOut,
    Unauthorized,
)

PROVIDER = "mlx"

log = logging.getLogger(__name__)


class LiteLLMErrors:
    """Ends of iterations and cancellation (a `BaseException`) pass unchanged."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        passes = (StopIteration, StopAsyncIteration, *LITELLM_EXCEPTION_TYPES)
        if not isinstance(error, Exception) or isinstance(error, passes):
            return
        raise to_litellm(error, self.model) from error


def to_litellm(error: Exception, model: str) -> Exception:
    """An unexpected error is logged and becomes a 500."""
    names = {"model": model, "llm_provider": PROVIDER}
    if not isinstance(error, MLXProviderError):
        log.error("unforeseen error", exc_info=error)
        return InternalServerError(f"{type(error).__name__} in the provider", **names)  # type: ignore[no-any-return]
    if isinstance(error, ContextTooLong):
        return _context_too_long(error, names)
    if isinstance(error, ModelNotFound):
        return NotFoundError(error.message, response=_never_cool_down(404), **names)  # type: ignore[no-any-return]
    if isinstance(error, BodyTooLarge):
        return _body_too_large(error, names)
    if isinstance(error, PluginError):
        return _plugin_at_fault(error, names)
    for ours, theirs in _CLASSES:
        if isinstance(error, ours):
            return _later(theirs(error.message, **names), error.retry_after)
    return InternalServerError(error.message, **names)  # type: ignore[no-any-return]


_CLASSES: tuple[tuple[type[MLXProviderError], type[Exception]], ...] = (
    (BadRequest, BadRequestError),
    (RequestTimedOut, Timeout),
    (Overloaded, RateLimitError),
    (EngineUnavailable, ServiceUnavailableError),
    (Unauthorized, ServiceUnavailableError),
)


def _context_too_long(error: ContextTooLong, names: dict[str, str]) -> Exception:
    """Its `code` makes Codex compact its history instead of a retry."""
    theirs = ContextWindowExceededError(error.message, **names)
    theirs.code = error.code
    theirs.body = {"code": error.code, "message": error.message, "type": "invalid_request_error"}
    return theirs  # type: ignore[no-any-return]


def is_context_full(error: Exception) -> bool:
    """Whether a LiteLLM exception was made from our `ContextTooLong`."""
    ours = getattr(error, "llm_provider", "") == PROVIDER
    return ours and isinstance(error, ContextWindowExceededError)


def _body_too_large(error: BodyTooLarge, names: dict[str, str]) -> Exception:
    """LiteLLM has no class of status 413; its proxy answers with the status of the exception."""
    theirs = BadRequestError(error.message, **names)
    theirs.status_code = error.status
    return theirs  # type: ignore[no-any-return]


def _plugin_at_fault(error: PluginError, names: dict[str, str]) -> Exception:
    """Status and header both forbid a retry (openai 2.54, anthropic 2.12, `_should_retry`)."""
    response = _response(error.status, {"x-should-retry": "false"})
    theirs = UnprocessableEntityError(error.message, response=response, **names)
    theirs.headers = dict(response.headers)
    theirs.code = error.code
    return theirs  # type: ignore[no-any-return]


def _later(theirs: Exception, seconds: float | None) -> Exception:
    """Sets the time until a retry, for the router and for clients.

    The proxy sends an exception's own `headers`, but renames those of its response (litellm
    1.106.2, `ProxyBaseLLMRequestProcessing.handle_llm_api_exception`).
    """
    if seconds is not None:
        wait = {"retry-after": str(ceil(seconds))}
        theirs.headers = wait  # type: ignore[attr-defined]
        theirs.litellm_response_headers = httpx.Headers(wait)  # type: ignore[attr-defined]
    return theirs


def _never_cool_down(status: int) -> httpx.Response:
    """`retry-after: 0` keeps the deployment in the router.

    Otherwise one 404, such as for a wrong name under a wildcard entry, disables a model group for
    five seconds (litellm 1.106.2, `Router.deployment_callback_on_failure`).
    """
    return _response(status, {"retry-after": "0"})


def _response(status: int, headers: dict[str, str]) -> httpx.Response:
    request = httpx.Request("POST", "http://mlx-provider.invalid/")
    return httpx.Response(status, headers=headers, request=request)


SERVED = frozenset(
    {
        CallTypes.completion,
        CallTypes.acompletion,
        CallTypes.text_completion,
        CallTypes.atext_completion,
        CallTypes.responses,
        CallTypes.aresponses,
        CallTypes.aresponses_websocket,
        CallTypes.anthropic_messages,
        CallTypes.aanthropic_messages,
        CallTypes.embedding,
        CallTypes.aembedding,
    }
)


def check_served(call_type: Any) -> None:
    """Raises `BadRequest` that names the kind of call. A kind that LiteLLM cannot name passes."""
    if call_type is not None and call_type not in SERVED:
        raise _refusal(_name(call_type.value))


def unserved(name: str) -> Any:
    def refuse(self: object, *args: Any, **given: Any) -> NoReturn:
        with LiteLLMErrors(given["model"]):
            raise _refusal(name)
        raise AssertionError  # a context can suppress an error, this one never does

    return refuse


def _refusal(name: str) -> BadRequest:
    return BadRequest(
        f"{name} is not served by mlx models, which answer chat completions, completions, "
        "responses, messages and embeddings: name a model of another provider",
        param="model",
    )


def _name(call_type: str) -> str:
    plain = call_type.removeprefix("a")
    return plain if plain in {each.value for each in CallTypes} else call_type
