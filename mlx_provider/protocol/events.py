"""Events: the messages of an engine about one request. `Accepted` comes first. Then a choice has a
`Delta` for each piece and a `Finish` at its end; in a request for vectors, each input has an
`Embedded`. The last event is `Done` after success, else `Failed`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from ..bounds import check_field_count
from ..errors import MLXProviderError, from_code

PROTOCOL_VERSION = 1  # clients refuse an engine with another one
MOST_TOKENS = 2**31 - 1  # upper limit of fields that count tokens
MOST_SECONDS = 10**9  # upper limit of fields that are times


class Wire(BaseModel):
    """Base of all messages: frozen, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FromClient(Wire):
    """Base of what clients send. Refuses too many fields before each is checked."""

    _few_fields = model_validator(mode="before")(check_field_count)


FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class TokenLogprob(Wire):
    """One token, with the natural logarithm of its probability before any sampling change."""

    token: str  # its text
    id: int
    logprob: float | None  # `None`: the first token of a prompt, without context
    bytes: list[int]  # the same in UTF-8, perhaps a part of a character
    top: list[TokenLogprob] = Field(default_factory=list)  # the most likely tokens in its place


class ToolCallDelta(Wire):
    """A piece of a tool call. Only the first piece of a call has `id` and `name`."""

    index: int  # of the call in its choice
    id: str | None = None
    name: str | None = None
    arguments: str = ""  # the next piece of the JSON text


class Accepted(Wire):
    """The request will be served. Says what is known before its first token."""

    type: Literal["accepted"] = "accepted"
    id: str  # of the request
    model: str
    prompt_tokens: int
    max_tokens: int  # of each choice, at most the rest of the context; 0 for embeddings
    context_length: int | None = None  # of the model in tokens; `None`: unknown
    vision: bool | None = None  # whether the model takes images; `None`: unknown
    reasoning: bool | None = None  # whether thoughts are separated from content; `None`: unknown
    temperature: float | None = Field(None, exclude=True)  # not sent to other processes
    top_p: float | None = Field(None, exclude=True)
    echo: str = ""  # the prompt's text, if requested
    warnings: list[str] = Field(default_factory=list)


class Delta(Wire):
    """The next piece of a choice: the text, thoughts and calls that are new since the last one."""

    type: Literal["delta"] = "delta"
    index: int = 0  # of the choice
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)


class Embedded(Wire):
    type: Literal["embedded"] = "embedded"
    index: int  # of the input
    vector: str  # float32, little-endian, base64


class Finish(Wire):
    type: Literal["finish"] = "finish"
    index: int = 0  # of the choice
    reason: FinishReason
    stop: str | None = None  # the stop string that ended it, if one did


class Usage(Wire):  # numbers of tokens, of all choices together
    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    stored_tokens: int = 0  # of the prompt, new in the prefix cache
    skipped_tokens: int = 0  # of the prompt, left out by sparse prefill
    completion_tokens: int
    reasoning_tokens: int = 0  # those of `completion_tokens` that are thoughts
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafted tokens that became part of the reply


class Timings(Wire):
    """Seconds, measured by the engine."""

    queued: float  # from the request's arrival to the start of its prefill
    prefill: float  # from there to the first token
    first_token: float  # from the arrival to the first token
    total: float  # from the arrival to the end
    tokens_per_second: float  # of all choices, after the first token


class Done(Wire):
    type: Literal["done"] = "done"
    usage: Usage
    timings: Timings


class ErrorBody(Wire):  # the same fields as `MLXProviderError`
    code: str
    message: str
    param: str | None = None
    status: int = 500
    retry_after: float | None = None

    @classmethod
    def of(cls, error: MLXProviderError) -> ErrorBody:
        return cls.model_validate(error, from_attributes=True)

    def exception(self) -> MLXProviderError:
        """An error of the class with this `code`, to raise. It has no traceback."""
        return from_code(self.code, self.message, self.param, self.retry_after)


class Failed(Wire):
    type: Literal["failed"] = "failed"
    error: ErrorBody

    @classmethod
    def of(cls, error: MLXProviderError) -> Failed:
        return cls(error=ErrorBody.of(error))


Event = Annotated[Accepted | Delta | Embedded | Finish | Done | Failed, Field(discriminator="type")]

EVENT_BATCH: TypeAdapter[list[Event]] = TypeAdapter(list[Event])  # one line of a reply
