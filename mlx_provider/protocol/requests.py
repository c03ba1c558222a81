"""Requests of a client, with its sampling parameters and the operator's options of the model.

The reply is a stream of `events`. Each line is a JSON list: the events of one engine step. The
first line has `Accepted`; the last event is `Done` or `Failed`."""

import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from .. import bounds
from .events import MOST_SECONDS, MOST_TOKENS, FromClient


class Sampling(FromClient):
    """`None`: the model's default, or the neutral value."""

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: bounds.TokenBias = Field(default_factory=dict)


OWNER_ONLY = frozenset(
    "adapter allow_media draft_model drafter dtype extra keep_alive kv_bits modality reproducible"
    " sparse_prefill trust_remote_code".split()
)
"""Options that run code, read files, reach hosts, need separate weights or displace others': never
set by another machine."""
NAMED_KEYS = frozenset({"context_length"})
"""The only options that a request with a named key may set (see `serving.permissions`)."""


class WarmPrompt(FromClient):
    messages: bounds.Messages
    tools: bounds.Tools = Field(default_factory=list)


class ModelOptions(FromClient):
    model_config = ConfigDict(allow_inf_nan=False)

    adapter: str | None = None
    trust_remote_code: bool = False
    context_length: int | None = Field(None, gt=0, le=MOST_TOKENS)
    kv_bits: Literal[4, 8] | None = None
    dtype: Literal["auto", "native", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights in memory; `native`: as in the checkpoint; `auto`: the same, but float32 on a
    CPU if that fits into memory."""
    reproducible: bool = False
    """Passes have a fixed size, so that a request gives the same tokens in any batch."""
    modality: Literal["auto", "text"] = "auto"
    keep_alive: float | None = Field(None, ge=-1, le=MOST_SECONDS)
    """Seconds without a request until the model is unloaded; -1: never; `None`: when another model
    needs the memory."""
    drafter: Annotated[str, BeforeValidator(lambda name: "off" if name is False else name)] = "auto"
    """YAML reads `off` as `False`."""
    draft_model: str | None = None
    """Folder of a smaller model with the same vocabulary, for the drafter `model`."""
    sparse_prefill: float | None = Field(None, ge=0.1, le=0.9)
    """Share of a long prompt's tokens that is prefilled: the most important by the draft model;
    `None`: all."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    """Needed if the checkpoint does not say how states become a vector."""
    allow_media: list[Literal["private", "file"]] = Field(default_factory=list)
    """Beside public addresses: `private` addresses, and files of the engine's machine (`file`)."""
    warm: list[str | WarmPrompt] = Field(default_factory=list, max_length=bounds.MAX_WARM)
    """Prefilled before a tenant's first request. A text is a system prompt."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Passed unchanged to the family's `load` and to drafters."""


class OperatorOptions(ModelOptions):
    cache_salt: str = "key"
    """Who shares cached prompts: `key`, `team`, `all`, or all entries with this text."""


RENDERER_ARGUMENTS = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation conversations"
    " documents max_length messages padding return_assistant_tokens_mask return_dict"
    " return_tensors sanitize_control_tokens self tokenize tokenizer_kwargs tools"
    " truncation".split()
)
"""Arguments of the template's renderer (transformers 5, `apply_chat_template`)."""


class ModelRequest(FromClient):
    path: ClassVar[str]

    id: bounds.Name = Field(default_factory=lambda: uuid.uuid4().hex)
    model: bounds.Name
    origin: Literal["owner", "client", "remote", "named"] = "owner"
    """Who chose the model: the engine's owner, a client of a gateway (by a wildcard entry), or
    another machine, with the engine's key or a named one (set by the engine's TCP server)."""
    salt: bounds.Label | None = None
    """Requests with different salts share no cache, nor do local requests with those of other
    machines, unless the owner gives the salt `remote:...`."""
    tenant: bounds.Label | None = None
    """Tenants share the device. `None`: the salt."""
    share: float = Field(1.0, ge=1 / 64, le=64)
    options: ModelOptions = ModelOptions()
    timeout: float | None = Field(None, gt=0, le=MOST_SECONDS)
    """Seconds from acceptance."""
    ignored: bounds.Ignored = Field(default_factory=list)
    """Parameters without effect. Each gives a warning."""

    @property
    def remote(self) -> bool:
        return self.origin in ("remote", "named")

    @property
    def namespace(self) -> str:
        """Requests with the same namespace share prefixes, features of images, grammars."""
        salt = self.salt or ""
        return f"remote:{salt}" if self.remote else salt


class EmbedRequest(ModelRequest):
    """Texts, or lists of token ids. The reply has an `Embedded` for each."""

    path: ClassVar[str] = "/v1/embed"

    input: bounds.Inputs
    dimensions: int | None = Field(None, ge=1)
    """First dimensions to return, normalised again."""
    prompt_name: bounds.Label | None = None
    """One of the model's prompts to put before each text; `None`: its default."""


class GenerateRequest(ModelRequest):
    path: ClassVar[str] = "/v1/generate"

    messages: bounds.Messages | None = None
    continues: bool = True
    """A last message of the assistant is the beginning of the reply, not a complete turn."""
    prompt: str | bounds.Tokens | None = None
    """Control tokens in its text are interpreted."""
    echo: bool = False
    """Return the prompt's text in `Accepted`. With `logprobs`, each choice begins with those of the
    prompt's tokens, without content."""
    tools: bounds.Tools = Field(default_factory=list)
    tool_grammars: bounds.JsonObject = Field(default_factory=dict)
    """By name of a tool with one text parameter: its `grammar`, with any `tool_choice`."""
    tool_choice: Literal["none", "auto", "required"] | bounds.JsonObject = "auto"
    parallel_tool_calls: bool = True
    response_format: bounds.JsonObject | None = None
    grammar: bounds.JsonObject | None = None
    """`{"type": "regex" | "lark", "value": str}`, beside `response_format`."""
    template: bounds.JsonObject = Field(default_factory=dict)
    thinking_budget: int | None = Field(None, ge=0)
    sampling: Sampling = Sampling()
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    drafts: bool = True
    sparse_prefill: bool = True
    """Has an effect only if the operator has enabled it."""
    stop: bounds.StopStrings = Field(default_factory=list)
    stop_token_ids: bounds.TokenIds = Field(default_factory=list)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    session: bounds.Label | None = None
    """Requests of one session belong together; the prefix cache keeps their prefix longer."""
    retain: bool = False
    """The session's next request comes after a long pause."""

    @field_validator("tool_choice")
    @classmethod
    def _shorten_choice(cls, choice: str | dict[str, Any]) -> str | dict[str, Any]:
        """`{"type": "none"}` is `"none"`."""
        match choice:
            case {"type": "none" | "auto" | "required" | "any" as kind}:
                return "required" if kind == "any" else str(kind)
        return choice

    @field_validator("template")
    @classmethod
    def _leaves_the_renderer_alone(cls, template: dict[str, Any]) -> dict[str, Any]:
        if taken := RENDERER_ARGUMENTS & template.keys():
            names = {"names": ", ".join(sorted(taken))}
            raise PydanticCustomError("reserved", "chat_template_kwargs cannot set {names}", names)
        return template
