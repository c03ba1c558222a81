"""Every error this package raises on purpose.

    MLXProviderError                 500  internal_error
    ├── BadRequest                   400  invalid_request        (names the parameter)
    │   ├── ContextTooLong           400  context_length_exceeded
    │   ├── BodyTooLarge             413  body_too_large
    │   ├── UnsupportedModel         400  unsupported_model
    │   ├── Forbidden                403  forbidden              (the operator's to decide)
    │   ├── WrongContentType         415  unsupported_media_type
    │   ├── MediaError               400  invalid_media
    │   └── GrammarFailed            400  grammar_failed
    ├── Unauthorized                 401  unauthorized
    ├── ModelNotFound                404  model_not_found
    ├── RequestTimedOut              408  timeout
    ├── Overloaded                   429  overloaded
    ├── RequestFailed                500  request_failed         (this request alone)
    ├── EngineUnavailable            503  engine_unavailable
    │   ├── EngineDied               503  engine_died
    │   ├── OtherProtocol            503  other_protocol
    │   ├── LoadFailed               503  load_failed
    │   ├── MemoryInUse              503  memory_in_use          (says when to try again)
    │   ├── RankLost                 503  rank_lost
    │   ├── RanksDiffer              503  ranks_differ
    │   └── NotInstalled             503  not_installed
    └── PluginError                  422  plugin_error           (clients send it no second time)

An error crosses the process border as its `code` and comes back as the same class.
"""

from __future__ import annotations

import copy
from typing import ClassVar, Self

RESTART = 1.0
"""Seconds after which a new engine may be asked."""
LONGEST = 2000
"""Characters of a message, which may quote what a client sent."""


class MLXProviderError(Exception):
    """Base class. `status` is the HTTP status, `code` the word a program may rely on."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        if len(message) > LONGEST:
            message = message[:LONGEST] + "…"
        super().__init__(message)
        self.message = message
        self.param = param
        """Name of the request part at fault, where one is."""
        self.retry_after = retry_after
        """Seconds after which the same request may succeed, where that can be said."""


class BadRequest(MLXProviderError):
    """The request cannot be served as written; the message names the part and the remedy."""

    status = 400
    code = "invalid_request"


class ContextTooLong(BadRequest):
    """The prompt has more tokens than the model's context."""

    code = "context_length_exceeded"
    tokens = 0
    """Of the prompt, at least, where that is known."""

    @classmethod
    def of(cls, tokens: int, context_length: int, counted: str = "") -> ContextTooLong:
        """For a prompt of so many tokens; `counted`: how well that is known (`"at least "`)."""
        error = cls(
            f"prompt is too long: {counted}{tokens} tokens > {context_length - 1} maximum "
            f"(context of {context_length}, one token of reply at least)",
            param="messages",
        )
        error.tokens = tokens
        return error


class BodyTooLarge(BadRequest):
    """The request's body has more bytes, or more values, than the engine takes."""

    status = 413
    code = "body_too_large"


class UnsupportedModel(BadRequest):
    """No installed family serves this `model_type`."""

    code = "unsupported_model"


class Forbidden(BadRequest):
    """What only the engine's owner grants; the message names it and where it is granted."""

    status = 403
    code = "forbidden"


class WrongContentType(BadRequest):
    """A body that is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"


class MediaError(BadRequest):
    """An image or video could not be fetched, decoded, or is not allowed."""

    code = "invalid_media"


class GrammarFailed(BadRequest):
    """The request's own grammar or schema gave up while its reply was written."""

    code = "grammar_failed"


class Unauthorized(MLXProviderError):
    """The engine's key is missing or wrong."""

    status = 401
    code = "unauthorized"


class ModelNotFound(MLXProviderError):
    """Neither a folder, nor in the local cache, nor on the Hub."""

    status = 404
    code = "model_not_found"


class RequestTimedOut(MLXProviderError):
    """The request's own time limit passed."""

    status = 408
    code = "timeout"


class Overloaded(MLXProviderError):
    """The queue is full; the message says how long it is."""

    status = 429
    code = "overloaded"


class RequestFailed(MLXProviderError):
    """This request's own step failed on the device; others were not touched."""

    code = "request_failed"

    @classmethod
    def cancelled(cls) -> Self:
        """Nobody waits for the reply any more."""
        return cls("the request was cancelled by its own client")


class EngineUnavailable(MLXProviderError):
    """No engine process answers."""

    status = 503
    code = "engine_unavailable"


class EngineDied(EngineUnavailable):
    """The engine ended while it held this request; a new one starts with the next request."""

    code = "engine_died"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = RESTART
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)


class RankLost(EngineUnavailable):
    """A rank of the group that serves one model ended or stopped answering; the group restarts."""

    code = "rank_lost"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = RESTART
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)


class RanksDiffer(EngineUnavailable):
    """Ranks of a group have other versions, plugins or weights: it does not start."""

    code = "ranks_differ"


class OtherProtocol(EngineUnavailable):
    """The engine is of another version, with which nothing but its end can be spoken of."""

    code = "other_protocol"


class LoadFailed(EngineUnavailable):
    """A model could not be loaded; the message says by whom and why."""

    code = "load_failed"


class MemoryInUse(EngineUnavailable):
    """Requests for other models hold the memory that this one needs, for the time being."""

    code = "memory_in_use"


class NotInstalled(EngineUnavailable):
    """A needed package is missing; the message names the extra to install."""

    code = "not_installed"


class PluginError(MLXProviderError):
    """A plugin is broken, or two plugins claim the same name.

    The status is one after which neither SDKs nor gateways try again: it would fail again.
    """

    status = 422
    code = "plugin_error"


def error_classes() -> dict[str, type[MLXProviderError]]:
    """Every class of the hierarchy by its `code`.

    Those of others, such as a plugin's, are left out: one would take the place of ours.
    """
    found: dict[str, type[MLXProviderError]] = {}
    todo: list[type[MLXProviderError]] = [MLXProviderError]
    while todo:
        cls = todo.pop()
        found[cls.code] = cls
        todo.extend(each for each in cls.__subclasses__() if each.__module__ == __name__)
    return found


def from_code(
    code: str, message: str, param: str | None = None, retry_after: float | None = None
) -> MLXProviderError:
    """The error that `code` names; an unknown code gives the base class."""
    cls = error_classes().get(code, MLXProviderError)
    return cls(message, param=param, retry_after=retry_after)


def wrong_option(option: str, message: str) -> BadRequest:
    """What is wrong with an option that the operator chose for a model."""
    name = f"model_info.mlx.{option}"
    return BadRequest(f"{name}: {message}", param=name)


def for_another(error: MLXProviderError) -> MLXProviderError:
    """The same error to be raised in another thread.

    Without the traceback and the causes, whose frames keep alive what the failed call had made.
    """
    return copy.copy(error)
