"""Events: the messages of an engine about one request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from ..bounds import check_field_count
from ..errors import MLXProviderError, from_code

PROTOCOL_VERSION = 1
MOST_TOKENS = 2**31 - 1
MOST_SECONDS = 10**9


class Wire(BaseModel):
    """Frozen; refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FromClient(Wire):
    """Refuses too many fields before each is checked."""

    _few_fields = model_validator(mode="before")(check_field_count)


FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class TokenLogprob(Wire):
    """Natural logarithms of probabilities before any sampling change."""

    token: str
    id: int
    logprob: float | None
    """`None`: the first token of a prompt, without context."""
    bytes: list[int]
    top: list[TokenLogprob] = Field(default_factory=list)


class ToolCallDelta(Wire):
    """`id` and `name` come with the first piece of `arguments`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Accepted(Wire):
    type: Literal["accepted"] = "accepted"
    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    context_length: int | None = None
    """`None`: unknown."""
    vision: bool | None = None
    reasoning: bool | None = None
    temperature: float | None = Field(None, exclude=True)
    """For replies in the engine's process."""
    top_p: float | None = Field(None, exclude=True)
    echo: str = ""
    warnings: list[str] = Field(default_factory=list)


class Delta(Wire):
    type: Literal["delta"] = "delta"
    index: int = 0
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)


class Embedded(Wire):
    type: Literal["embedded"] = "embedded"
    index: int
    vector: str
    """float32, little-endian, base64."""


class Finish(Wire):
    type: Literal["finish"] = "finish"
    index: int = 0
    reason: FinishReason
    stop: str | None = None


class Usage(Wire):
    prompt_tokens: int
    cached_tokens: int = 0
    stored_tokens: int = 0
    """Put into the prefix cache, beside `cached_tokens`."""
    skipped_tokens: int = 0
    completion_tokens: int
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Timings(Wire):
    """Seconds, measured by the engine."""

    queued: float
    prefill: float
    first_token: float
    total: float
    tokens_per_second: float


class Done(Wire):
    type: Literal["done"] = "done"
    usage: Usage
    timings: Timings


class ErrorBody(Wire):
    code: str
    message: str
    param: str | None = None
    status: int = 500
    retry_after: float | None = None

    @classmethod
    def of(cls, error: MLXProviderError) -> ErrorBody:
        return cls.model_validate(error, from_attributes=True)

    def exception(self) -> MLXProviderError:
        return from_code(self.code, self.message, self.param, self.retry_after)


class Failed(Wire):
    type: Literal["failed"] = "failed"
    error: ErrorBody

    @classmethod
    def of(cls, error: MLXProviderError) -> Failed:
        return cls(error=ErrorBody.of(error))


Event = Annotated[Accepted | Delta | Embedded | Finish | Done | Failed, Field(discriminator="type")]

EVENT_BATCH: TypeAdapter[list[Event]] = TypeAdapter(list[Event])
