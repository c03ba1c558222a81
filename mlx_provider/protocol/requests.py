"""Requests of a client, for text (`GenerateRequest`) or vectors (`EmbedRequest`), with the sampling
parameters and the operator's options of the model.

Each line of the reply is a JSON list of `events`. The first line has only `Accepted`. The last
event is `Done` or `Failed`."""

import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from .. import bounds
from .events import MOST_SECONDS, MOST_TOKENS, FromClient


class Sampling(FromClient):
    """How tokens are drawn. `None`: the model's default, else no effect."""

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
"""Options that run code, read files, reach hosts, need separate weights or take memory from others.
A request from another machine may not set them."""
NAMED_KEYS = frozenset({"context_length"})
"""The only options that a request with a named key (`server.access`) may set."""


class WarmPrompt(FromClient):  # the beginning of later prompts
    messages: bounds.Messages
    tools: bounds.Tools = Field(default_factory=list)


class ModelOptions(FromClient):
    """Options of one model, with which it is loaded and served."""

    model_config = ConfigDict(allow_inf_nan=False)

    adapter: str | None = None  # folder of a LoRA adapter
    trust_remote_code: bool = False  # whether code in the checkpoint may run
    context_length: int | None = Field(None, gt=0, le=MOST_TOKENS)  # `None`: the model's own
    kv_bits: Literal[4, 8] | None = None  # of the cache; `None`: not quantised
    dtype: Literal["auto", "native", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in memory. `native`: as in the checkpoint. `auto`: the same, but float32
    on a CPU if that fits into memory."""
    reproducible: bool = False  # passes of a fixed size: the same tokens in any batch
    modality: Literal["auto", "text"] = "auto"  # `text`: without the weights for images
    keep_alive: float | None = Field(None, ge=-1, le=MOST_SECONDS)
    """Idle seconds until the model is unloaded. -1: never. `None`: when memory is needed."""
    # YAML reads `off` as `False`
    drafter: Annotated[str, BeforeValidator(lambda name: "off" if name is False else name)] = "auto"
    draft_model: str | None = None
    """Folder of a smaller model with the same vocabulary, for the drafter `model`."""
    sparse_prefill: float | None = Field(None, ge=0.1, le=0.9)
    """Share of a long prompt's tokens that is prefilled: those that the draft model finds most
    important. `None`: all."""
    tool_parser: str | None = None  # its name; `None`: the one that matches the chat template
    reasoning_parser: str | None = None  # likewise
    pooling: Literal["last", "mean", "cls"] | None = None
    """How states become a vector, for a checkpoint that does not say so."""
    allow_media: list[Literal["private", "file"]] = Field(default_factory=list)
    """Beside public addresses: `private` addresses, and files of the engine's machine (`file`)."""
    warm: list[str | WarmPrompt] = Field(default_factory=list, max_length=bounds.MAX_WARM)
    """Prefilled before a tenant's first request. A text is a system prompt."""
    extra: dict[str, Any] = Field(default_factory=dict)  # for the family's `load` and for drafters


class OperatorOptions(ModelOptions):  # of an entry in the gateway's config
    cache_salt: str = "key"
    """Who shares cached prompts: requests with the same `key` or `team` of the gateway, `all`, or
    those of all entries with this text."""


RENDERER_ARGUMENTS = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation conversations"
    " documents max_length messages padding return_assistant_tokens_mask return_dict"
    " return_tensors sanitize_control_tokens self tokenize tokenizer_kwargs tools"
    " truncation".split()
)
"""Arguments of `apply_chat_template` (transformers 5), which `template` may not set."""


class ModelRequest(FromClient):
    """What requests for text and for vectors have in common."""

    path: ClassVar[str]  # route of the engine

    id: bounds.Name = Field(default_factory=lambda: uuid.uuid4().hex)
    model: bounds.Name
    origin: Literal["owner", "client", "remote", "named"] = "owner"
    """Who chose the model: the engine's owner, a client of a gateway (by a wildcard entry), or
    another machine, with the engine's key or a named one. The TCP server sets the last two."""
    salt: bounds.Label | None = None
    """Requests with different salts share no cache. Neither do local requests and those of other
    machines, unless the owner gives the salt `remote:...`."""
    tenant: bounds.Label | None = None
    """Whose request it is, for the fair division of the device. `None`: the namespace."""
    share: float = Field(1.0, ge=1 / 64, le=64)  # the tenant's weight in this division
    options: ModelOptions = ModelOptions()
    timeout: float | None = Field(None, gt=0, le=MOST_SECONDS)  # seconds from arrival in the engine
    ignored: bounds.Ignored = Field(default_factory=list)  # parameters without effect; each warns

    @property
    def remote(self) -> bool:
        """Whether another machine chose the model."""
        return self.origin in ("remote", "named")

    @property
    def namespace(self) -> str:
        """Requests with the same namespace share prefixes, features of images, and grammars."""
        salt = self.salt or ""
        return f"remote:{salt}" if self.remote else salt


class EmbedRequest(ModelRequest):
    """Texts, or lists of token ids. The reply has an `Embedded` for each."""

    path: ClassVar[str] = "/v1/embed"

    input: bounds.Inputs
    dimensions: int | None = Field(None, ge=1)
    """Length of the vectors to return: their first numbers, normalised again. `None`: all."""
    prompt_name: bounds.Label | None = None
    """Name of the model's prompt to put before each text. `None`: its default."""


class GenerateRequest(ModelRequest):
    """A reply to `messages`, or the continuation of the text or tokens in `prompt`."""

    path: ClassVar[str] = "/v1/generate"

    messages: bounds.Messages | None = None
    continues: bool = True
    """A last message of the assistant is the beginning of the reply, not a complete turn."""
    prompt: str | bounds.Tokens | None = None  # control tokens in its text are interpreted
    echo: bool = False
    """Return the prompt's text in `Accepted`. With `logprobs`, each choice begins with the
    log-probabilities of the prompt's tokens, without content."""
    tools: bounds.Tools = Field(default_factory=list)
    tool_grammars: bounds.JsonObject = Field(default_factory=dict)
    """By the tool's name: the `grammar` of the text that is the tool's only parameter."""
    tool_choice: Literal["none", "auto", "required"] | bounds.JsonObject = "auto"
    parallel_tool_calls: bool = True
    response_format: bounds.JsonObject | None = None
    grammar: bounds.JsonObject | None = None
    """`{"type": "regex" | "lark", "value": str}` for the reply, in place of `response_format`."""
    template: bounds.JsonObject = Field(default_factory=dict)  # variables for the chat template
    thinking_budget: int | None = Field(None, ge=0)  # tokens of thoughts; `None`: no limit
    sampling: Sampling = Sampling()
    n: int = Field(1, ge=1, le=128)  # choices
    max_tokens: int | None = Field(None, ge=1)  # of each choice; `None`: the rest of the context
    min_tokens: int = Field(0, ge=0)
    drafts: bool = True  # has an effect only if the model has a drafter
    sparse_prefill: bool = True  # has an effect only with the operator's option
    stop: bounds.StopStrings = Field(default_factory=list)
    stop_token_ids: bounds.TokenIds = Field(default_factory=list)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    session: bounds.Label | None = None
    """Requests of one session belong together; the prefix cache keeps their prefix longer."""
    retain: bool = False  # the session's next request comes after a long pause

    @field_validator("tool_choice")
    @classmethod
    def _shorten_choice(cls, choice: str | dict[str, Any]) -> str | dict[str, Any]:
        """`{"type": "none"}` means `"none"`, and `any` means `required`."""
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
