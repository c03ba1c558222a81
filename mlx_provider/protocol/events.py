"""Events: the messages of an engine about one request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from ..errors import MLXProviderError, from_code
from .wire_model import Wire

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class TokenLogprob(Wire):
    """One token, its natural-log probability before any sampling change, and alternatives."""

    token: str
    id: int
    logprob: float | None
    """`None`: the first token of a prompt, which has no context."""
    bytes: list[int]
    top: list[TokenLogprob] = Field(default_factory=list)


class ToolCallDelta(Wire):
    """A piece of one tool call: `id` and `name` come first, then pieces of `arguments`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Accepted(Wire):
    """The request is valid and in the queue."""

    type: Literal["accepted"] = "accepted"
    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    context_length: int | None = None
    """Maximum number of tokens of prompt and reply; `None`: unknown."""
    vision: bool | None = None
    """Whether this model accepts images; `None`: unknown."""
    reasoning: bool | None = None
    """Whether its reasoning is separated from its content."""
    temperature: float | None = Field(None, exclude=True)
    """The sampling temperature, from the request or the model. Not sent: only replies in
    the engine's process contain it."""
    top_p: float | None = Field(None, exclude=True)
    echo: str = ""
    warnings: list[str] = Field(default_factory=list)


class Delta(Wire):
    """New output of one choice."""

    type: Literal["delta"] = "delta"
    index: int = 0
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)


class Embedded(Wire):
    """The vector of one input."""

    type: Literal["embedded"] = "embedded"
    index: int
    vector: str
    """float32, little-endian, in base64."""


class Finish(Wire):
    """One choice has ended."""

    type: Literal["finish"] = "finish"
    index: int = 0
    reason: FinishReason
    stop: str | None = None
    """The stop string that ended it."""


class Usage(Wire):
    prompt_tokens: int
    cached_tokens: int = 0
    stored_tokens: int = 0
    """Other prompt tokens that this request has added to the prefix cache."""
    skipped_tokens: int = 0
    """Prompt tokens that sparse prefill has left out."""
    completion_tokens: int
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    """Draft tokens."""
    accepted_tokens: int = 0
    """Accepted draft tokens."""


class Timings(Wire):
    """Seconds, measured by the engine."""

    queued: float
    prefill: float
    first_token: float
    total: float
    tokens_per_second: float
    """Decode rate of this request: completion tokens after the first, divided by their time."""


class Done(Wire):
    """Every choice has ended."""

    type: Literal["done"] = "done"
    usage: Usage
    timings: Timings


class ErrorBody(Wire):
    code: str
    message: str
    param: str | None = None
    status: int = 500
    retry_after: float | None = None
    """Seconds after which the same request may succeed; `None`: unknown."""

    @classmethod
    def of(cls, error: MLXProviderError) -> ErrorBody:
        return cls(
            code=error.code,
            message=error.message,
            param=error.param,
            status=error.status,
            retry_after=error.retry_after,
        )

    def exception(self) -> MLXProviderError:
        """The error as an exception of the class with its code."""
        return from_code(self.code, self.message, self.param, self.retry_after)


class Failed(Wire):
    """The request ended with an error. It is the last event."""

    type: Literal["failed"] = "failed"
    error: ErrorBody

    @classmethod
    def of(cls, error: MLXProviderError) -> Failed:
        return cls(error=ErrorBody.of(error))


Event = Annotated[Accepted | Delta | Embedded | Finish | Done | Failed, Field(discriminator="type")]

EVENT_BATCH: TypeAdapter[list[Event]] = TypeAdapter(list[Event])
"""One line of the stream: the events of one engine step for one request."""
