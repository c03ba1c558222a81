"""What a client posts; the answer is a stream of `events`.

Each line of the answer is a JSON list: the events that one engine step made for the request. The
first line holds `Accepted`; the last event is `Done` or `Failed`. The in-process client passes the
same objects without JSON.
"""

from __future__ import annotations

import uuid
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from ..bounds import (
    Documents,
    Ignored,
    Inputs,
    JsonObject,
    Label,
    Messages,
    Name,
    StopStrings,
    TokenIds,
    Tokens,
    Tools,
)
from .options import ModelOptions
from .sampling import Sampling
from .wire_model import MOST_SECONDS, Asked

STARTS_ENGINES = ("x-mlx-provider-starts-engines", "yes")
"""Header of a client that can start an engine in the place of one that gives way."""

RENDERER_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of the template's renderer itself (transformers 5, `apply_chat_template`)."""


class ModelRequest(Asked):
    """What every request says: of which model it wants something, and who sends it."""

    path: ClassVar[str]
    """Where it is posted."""

    id: Name = Field(default_factory=lambda: uuid.uuid4().hex)
    model: Name
    origin: Literal["owner", "client", "remote"] = "owner"
    """Who chose the model: the engine's owner; a gateway's client, through a wildcard entry; or
    another machine, which the engine's TCP server says of every request."""
    tenant: Label | None = None
    """Prefixes are never shared between tenants, nor between this machine's and another's."""
    account: Label | None = None
    """Whose request it is: accounts share the device. `None`: the tenant's."""
    share: float = Field(1.0, ge=1 / 64, le=64)
    """Share of the device of this account, relative to others."""
    options: ModelOptions = ModelOptions()
    timeout: float | None = Field(None, gt=0, le=MOST_SECONDS)
    """Seconds from acceptance to the end."""
    ignored: Ignored = Field(default_factory=list)
    """Parameters that the client sent and that have no effect; echoed as warnings."""


class EmbedRequest(ModelRequest):
    """Texts, or lists of token ids, of which the vectors are wanted: an `Embedded` for each."""

    path: ClassVar[str] = "/v1/embed"

    input: Inputs
    """Control tokens in a text are spelt in letters; what the tokenizer adds to every text is
    added to texts, and to token ids nothing."""
    dimensions: int | None = Field(None, ge=1)
    """The first so many numbers of each vector, of length 1 again."""
    prompt_name: Label | None = None
    """One of the model's own prompts, which stands before each text; `None`: its default."""


class ScoreRequest(ModelRequest):
    """Documents, of which it is wanted how well each answers its query: a `Scored` for each.

    A part of the engine's server makes it, so it has no path of its own.
    """

    queries: Documents
    """One for all documents, or one for each."""
    documents: Documents
    instruction: str | None = None
    """What answers a query, in words for the model; `None`: the model's own."""


class GenerateRequest(ModelRequest):
    """One request: chat `messages`, or a raw text or token `prompt`."""

    path: ClassVar[str] = "/v1/generate"

    messages: Messages | None = None
    continues: bool = True
    """Whether a last message of the assistant is the beginning of the reply; else it is a turn of
    its own."""
    prompt: str | Tokens | None = None
    """Taken as it is: control tokens in a raw text are the caller's own, and stay."""
    echo: bool = False
    """Say in `Accepted` what the prompt is as text; with `logprobs`, each choice begins with those
    of the prompt's tokens, without content."""
    tools: Tools = Field(default_factory=list)
    tool_grammars: JsonObject = Field(default_factory=dict)
    """By the name of a tool whose one parameter is a text: the text's `grammar`, as below. It is
    enforced with any `tool_choice`."""
    tool_choice: Literal["none", "auto", "required"] | JsonObject = "auto"
    parallel_tool_calls: bool = True
    response_format: JsonObject | None = None
    grammar: JsonObject | None = None
    """`{"type": "regex" | "lark", "value": str}`: an extension beside `response_format`."""
    template: JsonObject = Field(default_factory=dict)
    """Variables for the chat template (`enable_thinking`, `reasoning_effort`, ...)."""
    thinking_budget: int | None = Field(None, ge=0)
    sampling: Sampling = Sampling()
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    drafts: bool = True
    """Whether tokens may be guessed ahead; they are the same either way."""
    sparse_prefill: bool = True
    """Whether tokens of a long prompt may be left out, where the operator has it so."""
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    session: Label | None = None
    """Hint that requests belong together; the prefix cache keeps their prefix longer."""
    retain: bool = False
    """Hint that the next request of the session comes after a long pause."""

    @field_validator("template")
    @classmethod
    def _leaves_the_renderer_alone(cls, template: dict[str, Any]) -> dict[str, Any]:
        if taken := RENDERER_ARGUMENTS & template.keys():
            names = ", ".join(sorted(taken))
            raise PydanticCustomError("reserved", "cannot set {names}", {"names": names})
        return template
