"""All errors that this package raises on purpose.

Between processes, an error is sent as `code`, message, `param` and `retry_after`, and becomes an
exception of the same class without its other attributes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

LONGEST = 2000
"""Characters of a message, which may quote a client's text."""


class MLXProviderError(Exception):
    """Base class. `status` is the HTTP status, `code` the word a program may rely on."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    default_retry_after: ClassVar[float | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        if len(message) > LONGEST:
            message = message[:LONGEST] + "…"
        super().__init__(message)
        self.message = message
        self.param = param
        """The wrong part of the request."""
        self.retry_after = self.default_retry_after if retry_after is None else retry_after
        """Seconds after which the same request may succeed."""


class BadRequest(MLXProviderError):
    """The request is wrong; the message names the part and the remedy."""

    status = 400
    code = "invalid_request"


class ContextTooLong(BadRequest):
    """The prompt has more tokens than the model's context."""

    code = "context_length_exceeded"
    tokens = 0
    """Tokens of the prompt, at least; 0: unknown."""

    @classmethod
    def of(cls, tokens: int, context_length: int, counted: str = "") -> ContextTooLong:
        """The error for a prompt of `tokens`. `counted`: text before it, such as `"at least "`."""
        error = cls(
            f"prompt is too long: {counted}{tokens} tokens > {context_length - 1} maximum "
            f"(context of {context_length}, one token of reply at least)",
            param="messages",
        )
        error.tokens = tokens
        return error


class BodyTooLarge(BadRequest):
    """The request's body has too many bytes or values."""

    status = 413
    code = "body_too_large"


class UnsupportedModel(BadRequest):
    """No family serves this `model_type`, or its family cannot serve this checkpoint."""

    code = "unsupported_model"


class Forbidden(BadRequest):
    """Only the engine's owner grants this; the message says where."""

    status = 403
    code = "forbidden"


class WrongContentType(BadRequest):
    """The body is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"


class MediaError(BadRequest):
    """An image or video could not be fetched, decoded, or is not allowed."""

    code = "invalid_media"
    others: Sequence[MediaError] = ()
    """Further errors of the same request."""

    def __init__(self, message: str, *, brief: str = "damaged", **more: Any) -> None:
        """`brief`: the reason in the text that replaces the image of an earlier turn."""
        super().__init__(message, **more)
        self.brief = brief

    @classmethod
    def with_others(cls, errors: Sequence[MediaError]) -> MediaError:
        """The first of `errors`, which now has the rest as `others`."""
        errors[0].others = errors[1:]
        return errors[0]


class GrammarFailed(BadRequest):
    """The request's grammar or schema failed while the reply was written."""

    code = "grammar_failed"


class Unauthorized(MLXProviderError):
    """The engine's key is missing or wrong."""

    status = 401
    code = "unauthorized"


class ModelNotFound(MLXProviderError):
    """The model is neither a folder, nor in the local cache, nor on the Hub."""

    status = 404
    code = "model_not_found"


class RequestTimedOut(MLXProviderError):
    """The request's time limit has passed."""

    status = 408
    code = "timeout"


class Overloaded(MLXProviderError):
    """Too many requests wait, or too many connections are open; the message says which."""

    status = 429
    code = "overloaded"


class RequestFailed(MLXProviderError):
    """The request failed in the engine or was cancelled; other requests were not affected."""

    code = "request_failed"

    @classmethod
    def cancellation(cls) -> Self:
        return cls("the request was cancelled by its own client")


class EngineUnavailable(MLXProviderError):
    """No engine process answers."""

    status = 503
    code = "engine_unavailable"
    maybe_accepted = True
    """Whether an engine may have accepted the request; if not, a client may send it again."""


class EngineDied(EngineUnavailable):
    """The engine ended during the request; the next request starts a new one."""

    code = "engine_died"
    default_retry_after = 1.0


class OtherProtocol(EngineUnavailable):
    """The engine has another version: it can only be told to end."""

    code = "other_protocol"


class LoadFailed(EngineUnavailable):
    """The model could not be loaded; the message names the plugin and the reason."""

    code = "load_failed"


class MemoryInUse(EngineUnavailable):
    """Requests for other models use the memory that the model needs."""

    code = "memory_in_use"


class NotInstalled(EngineUnavailable):
    """A package is missing; the message names the extra to install."""

    code = "not_installed"


class PluginError(MLXProviderError):
    """A plugin is broken, or two plugins claim the same name.

    SDKs and gateways do not retry after this status: the request would fail again."""

    status = 422
    code = "plugin_error"


def error_classes() -> dict[str, type[MLXProviderError]]:
    """The classes of this module by `code`. A plugin's class is left out: it could replace one."""
    classes = [value for value in globals().values() if isinstance(value, type)]
    return {cls.code: cls for cls in classes if issubclass(cls, MLXProviderError)}


def from_code(
    code: str, message: str, param: str | None = None, retry_after: float | None = None
) -> MLXProviderError:
    """The error that another process has sent. An unknown code gives the base class."""
    cls = error_classes().get(code, MLXProviderError)
    return cls(message, param=param, retry_after=retry_after)


def wrong_part(part: str, problem: str, inside: str = "") -> BadRequest:
    """`BadRequest` for a part of a request. `inside`: the path below it, only for the message."""
    return BadRequest(f"{part}{inside} {problem}", param=part)


def wrong_option(option: str, message: str) -> BadRequest:
    """`BadRequest` for an operator's option of a model."""
    return wrong_part(f"model_info.mlx.{option}", message, ":")


def for_another(error: MLXProviderError) -> MLXProviderError:
    """A copy for another thread without traceback and causes, whose frames keep objects alive."""
    copied = copy.copy(error)
    if isinstance(copied, MediaError):
        copied.others = [copy.copy(other) for other in copied.others]
    return copied
