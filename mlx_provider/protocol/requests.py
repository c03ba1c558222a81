"""Requests of a client. The reply is a stream of `events`.

Each line of the reply is a JSON list: the events of one engine step for the request. The first line
has `Accepted`; the last event is `Done` or `Failed`. The in-process client passes the same objects
without JSON."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from ..bounds import (
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
"""Header of a client that can start an engine in place of one that ends."""

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
"""Arguments of the template's renderer (transformers 5, `apply_chat_template`)."""


class ModelRequest(Asked):
    path: ClassVar[str]

    id: Name = Field(default_factory=lambda: uuid.uuid4().hex)
    model: Name
    origin: Literal["owner", "client", "remote", "named"] = "owner"
    """Who chose the model: the engine's owner, a client of a gateway (by a wildcard entry), or
    another machine, with the engine's key or a named one (set by the engine's TCP server)."""
    tenant: Label | None = None
    """Namespace of the prefix cache. Other machines have separate ones."""
    account: Label | None = None
    """Accounts share the device. `None`: the tenant."""
    share: float = Field(1.0, ge=1 / 64, le=64)
    """Share of the device, relative to other accounts."""
    options: ModelOptions = ModelOptions()
    timeout: float | None = Field(None, gt=0, le=MOST_SECONDS)
    """Seconds from acceptance to the end."""
    ignored: Ignored = Field(default_factory=list)
    """Client's parameters without effect. Each gives a warning."""

    @property
    def remote(self) -> bool:
        return self.origin in ("remote", "named")

    @property
    def namespace(self) -> str:
        """Requests with the same namespace share prefixes, features of images, grammars. Separate
        for each tenant and for other machines."""
        tenant = self.tenant or ""
        return f"remote:{tenant}" if self.remote else tenant


class EmbedRequest(ModelRequest):
    """Texts, or lists of token ids. The reply has an `Embedded` for each."""

    path: ClassVar[str] = "/v1/embed"

    input: Inputs
    """Control tokens in a text become plain text. Special tokens are added to texts, not to token
    ids."""
    dimensions: int | None = Field(None, ge=1)
    """First dimensions to return, normalised again."""
    prompt_name: Label | None = None
    """One of the model's prompts to put before each text; `None`: its default."""


class GenerateRequest(ModelRequest):
    path: ClassVar[str] = "/v1/generate"

    messages: Messages | None = None
    continues: bool = True
    """A last message of the assistant is the beginning of the reply, not a complete turn."""
    prompt: str | Tokens | None = None
    """Control tokens in its text are interpreted."""
    echo: bool = False
    """Return the prompt's text in `Accepted`. With `logprobs`, each choice begins with those of the
    prompt's tokens, without content."""
    tools: Tools = Field(default_factory=list)
    tool_grammars: JsonObject = Field(default_factory=dict)
    """By name of a tool with one text parameter: its `grammar`, as below, enforced with any
    `tool_choice`."""
    tool_choice: Literal["none", "auto", "required"] | JsonObject = "auto"
    parallel_tool_calls: bool = True
    response_format: JsonObject | None = None
    grammar: JsonObject | None = None
    """`{"type": "regex" | "lark", "value": str}`, beside `response_format`."""
    template: JsonObject = Field(default_factory=dict)
    """Template variables (`enable_thinking`, `reasoning_effort`, ...)."""
    thinking_budget: int | None = Field(None, ge=0)
    sampling: Sampling = Sampling()
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    drafts: bool = True
    """Speculation does not change the tokens."""
    sparse_prefill: bool = True
    """Has an effect only if the operator has enabled it."""
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    session: Label | None = None
    """Requests of one session belong together; the prefix cache keeps their prefix longer."""
    retain: bool = False
    """The session's next request comes after a long pause."""

    @field_validator("template")
    @classmethod
    def _leaves_the_renderer_alone(cls, template: dict[str, Any]) -> dict[str, Any]:
        if taken := RENDERER_ARGUMENTS & template.keys():
            names = ", ".join(sorted(taken))
            raise PydanticCustomError("reserved", "cannot set {names}", {"names": names})
        return template
