"""Converts our errors to LiteLLM's exceptions, whose classes decide status, retries, fallbacks and
cooldowns. Any other exception would reach a streaming client as a Python traceback (1.106.2). Also
refuses calls that mlx models do not serve, such as image generation."""

import logging
from collections.abc import Mapping
from math import ceil
from typing import Any

import httpx
from litellm import exceptions as theirs
from litellm.types.utils import CallTypes

from .. import errors as ours

PROVIDER = "mlx"

log = logging.getLogger(__name__)


class LiteLLMErrors:
    """For a `with` block: raises its errors as `to_litellm` converts them. LiteLLM's own, ends of
    iterations and cancellation (a `BaseException`) pass unchanged."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        passes = (StopIteration, StopAsyncIteration, *theirs.LITELLM_EXCEPTION_TYPES)
        if isinstance(error, Exception) and not isinstance(error, passes):
            raise to_litellm(error, self.model) from error


CLASSES: tuple[tuple[type[ours.MLXProviderError], type[Exception]], ...] = (
    (ours.ContextTooLong, theirs.ContextWindowExceededError),  # 400; `context_window_fallbacks`
    (ours.ModelNotFound, theirs.NotFoundError),
    (ours.PluginError, theirs.UnprocessableEntityError),
    (ours.BadRequest, theirs.BadRequestError),  # 400 or 413; never retried
    (ours.RequestTimedOut, theirs.Timeout),  # 408
    (ours.Overloaded, theirs.RateLimitError),  # 429; retried, and traffic moves to siblings
    (ours.EngineUnavailable, theirs.ServiceUnavailableError),  # 503; retried, and fallbacks
    (ours.Unauthorized, theirs.ServiceUnavailableError),  # 401 would mean the client's own key
    (ours.MLXProviderError, theirs.InternalServerError),  # 500; retried
)
"""Our classes and LiteLLM's. The first of ours that fits counts."""
HEADERS: Mapping[type[Exception], Mapping[str, str]] = {
    # Otherwise one 404, such as for a wrong name under a wildcard entry, disables a model group for
    # five seconds (1.106.2, `Router.deployment_callback_on_failure`).
    theirs.NotFoundError: {"retry-after": "0"},
    # Status and header both forbid a retry (openai 2.54, anthropic 2.12, `_should_retry`).
    theirs.UnprocessableEntityError: {"x-should-retry": "false"},
}
"""By LiteLLM's class: headers of the response that its exceptions get."""


def to_litellm(error: Exception, model: str) -> Exception:
    """LiteLLM's exception for an error. Of one that is not ours, clients see only the class."""
    fields: dict[str, Any] = {"model": model, "llm_provider": PROVIDER}
    if not isinstance(error, ours.MLXProviderError):
        log.error("unforeseen error", exc_info=error)
        message = f"{type(error).__name__} in the provider"
        return theirs.InternalServerError(message, **fields)  # type: ignore[no-any-return]
    kind = next(their_kind for our_kind, their_kind in CLASSES if isinstance(error, our_kind))
    if kind in HEADERS:
        request = httpx.Request("POST", "http://mlx-provider.invalid/")
        fields["response"] = httpx.Response(error.status, headers=HEADERS[kind], request=request)
    made: Any = kind(error.message, **fields)
    if isinstance(error, ours.ContextTooLong):  # its code makes Codex compact its history
        body = {"message": error.message, "type": "invalid_request_error"}
        made.code, made.body = error.code, {"code": error.code, **body}
    elif isinstance(error, ours.BodyTooLarge):  # the proxy answers with the status of the exception
        made.status_code = error.status
    elif isinstance(error, ours.PluginError):
        made.code, made.headers = error.code, dict(fields["response"].headers)
    elif error.retry_after is not None and kind is not theirs.NotFoundError:
        # For the router and for clients: the proxy sends an exception's own headers, but renames
        # those of its response (1.106.2, `handle_llm_api_exception`).
        made.headers = {"retry-after": str(ceil(error.retry_after))}
        made.litellm_response_headers = httpx.Headers(made.headers)
    return made  # type: ignore[no-any-return]


def is_context_full(error: Exception) -> bool:
    """Whether it is LiteLLM's exception for our `ContextTooLong`."""
    is_ours = getattr(error, "llm_provider", "") == PROVIDER
    return is_ours and isinstance(error, theirs.ContextWindowExceededError)


_CALLS = ("completion", "text_completion", "responses", "embedding")
SERVED = {
    *(CallTypes(prefix + name) for name in _CALLS for prefix in ("", "a")),
    CallTypes.aresponses_websocket,
    CallTypes.anthropic_messages,
    CallTypes.aanthropic_messages,
}


def check_served(call_type: Any) -> None:
    """Raise `BadRequest` for a `CallTypes` that is not in `SERVED`. `None` passes."""
    if call_type is not None and call_type not in SERVED:
        name = str(getattr(call_type, "value", call_type))
        plain = name.removeprefix("a")  # the synchronous name, where LiteLLM has one
        raise _refusal(plain if plain in {call.value for call in CallTypes} else name)


def make_refusal(name: str) -> Any:
    """A method of `CustomLLM` that refuses the call `name` with LiteLLM's `BadRequestError`."""

    def refuse(self: object, *args: Any, **given: Any) -> Any:
        with LiteLLMErrors(given["model"]):
            raise _refusal(name)

    return refuse


def _refusal(name: str) -> ours.BadRequest:
    return ours.BadRequest(
        f"{name} is not served by mlx models, which answer chat completions, completions, "
        "responses, messages and embeddings: name a model of another provider",
        param="model",
    )
