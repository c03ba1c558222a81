"""What crosses the process border: one request in, a stream of events out.

A client posts a `GenerateRequest` or an `EmbedRequest`; the answer is a stream of lines, each a
JSON list of the events that one engine step made for this request. The first line holds
`Accepted`; the last event is `Done` or `Failed`. The in-process transport passes the same objects
without JSON.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..bounds import (
    MAX_WARM,
    Ignored,
    Inputs,
    JsonObject,
    Label,
    Messages,
    Name,
    StopStrings,
    TokenBias,
    TokenIds,
    Tokens,
    Tools,
    checked_fields,
)
from ..errors import MLXProviderError, from_code

PROTOCOL_VERSION = 1
STARTS_ENGINES = ("x-mlx-provider-starts-engines", "yes")
"""Header of a client that can start an engine in the place of one that gives way."""

MOST_TOKENS = 2**31 - 1
MOST_SECONDS = 10**9
"""What clocks and waits of the system take, and far above any use."""

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Asked(_Wire):
    """A part of a request."""

    _few_fields = model_validator(mode="before")(checked_fields)


class Sampling(_Asked):
    """How tokens are drawn. `None` means: the model's default, else the neutral value."""

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: TokenBias = Field(default_factory=dict)


class WarmPrompt(_Asked):
    """A beginning that many requests will share."""

    messages: Messages
    tools: Tools = Field(default_factory=list)


class ModelOptions(_Asked):
    """What only the operator sets, from the config entry's `model_info`; never a client."""

    model_config = ConfigDict(allow_inf_nan=False)

    adapter: str | None = None
    trust_remote_code: bool = False
    context_length: int | None = Field(None, gt=0, le=MOST_TOKENS)
    kv_bits: Literal[4, 8] | None = None
    kv_group_size: Literal[32, 64, 128] = 64
    dtype: Literal["auto", "native", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights in memory; `native`: the checkpoint's; `auto`: that, but float32 on a CPU
    where it fits into memory."""
    reproducible: bool = False
    """Every pass has one size, so that a request gives the same tokens in any company."""
    modality: Literal["auto", "text"] = "auto"
    """`text`: serve a model that sees without the weights that see."""
    unseen_media: Literal["omit", "refuse"] | None = None
    """What becomes of images that the model cannot see; `None`: `refuse` where `modality` is
    `text`, else `omit`."""
    keep_alive: float | None = Field(None, ge=-1, le=MOST_SECONDS)
    """Seconds without a request after which its weights leave memory; -1: they stay, whatever
    other models need; `None`: they leave when another model needs their room."""
    drafter: str = "auto"
    """Who guesses tokens ahead: a name; `auto`: the best that can; `off`: nobody."""
    draft_model: str | None = None
    """Folder of a smaller model of the same vocabulary, for the drafter `model`."""
    draft_tokens: int | None = Field(None, ge=1, le=7)
    """Tokens that are guessed ahead at most."""
    sparse_prefill: float | None = Field(None, ge=0.1, le=0.9)
    """Share of a long prompt's tokens that is computed, those that the draft model finds to matter;
    `None`: all."""
    sparse_prefill_from: int = Field(8192, ge=256)
    """Tokens from which on a prompt is long."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    """Which states of a text make its vector, where the checkpoint does not say."""
    allow_private_media: bool = False
    allow_file_media: bool = False
    warm: list[str | WarmPrompt] = Field(default_factory=list, max_length=MAX_WARM)
    """Prompts to prefill before a tenant's first request; a text is a system prompt."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Options of a third-party family, passed to its `load` untouched."""


OWNERS_ALONE = frozenset(
    {
        "adapter",
        "allow_file_media",
        "allow_private_media",
        "draft_model",
        "dtype",
        "extra",
        "keep_alive",
        "modality",
        "trust_remote_code",
    }
)
"""Model options that run code, read files, reach hosts, make other weights or keep others' out of
memory: never another machine's to set."""

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


class ModelRequest(_Asked):
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

    @field_validator("template")
    @classmethod
    def _leaves_the_renderer_alone(cls, template: dict[str, Any]) -> dict[str, Any]:
        if taken := RENDERER_ARGUMENTS & template.keys():
            raise PydanticCustomError("reserved", "cannot set {names}", {"names": _listed(taken)})
        return template


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


class TokenLogprob(_Wire):
    """One token, its natural-log probability before any sampling change, and alternatives."""

    token: str
    id: int
    logprob: float | None
    """`None`: the first token of a prompt, before which nothing stands."""
    bytes: list[int]
    top: list[TokenLogprob] = Field(default_factory=list)


class ToolCallDelta(_Wire):
    """A piece of one tool call: `id` and `name` come first, then pieces of `arguments`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Accepted(_Wire):
    """The request is valid and has its place in the queue."""

    type: Literal["accepted"] = "accepted"
    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    context_length: int | None = None
    """Tokens of prompt and answer that this model can hold; `None`: not told."""
    vision: bool | None = None
    """Whether this model sees; `None`: not told."""
    reasoning: bool | None = None
    """Whether its thoughts are told from its answers."""
    echo: str = ""
    warnings: list[str] = Field(default_factory=list)


class Delta(_Wire):
    """New output of one choice."""

    type: Literal["delta"] = "delta"
    index: int = 0
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)


class Embedded(_Wire):
    """The vector of one input."""

    type: Literal["embedded"] = "embedded"
    index: int
    vector: str
    """float32, the lowest byte first, in base64."""


class Finish(_Wire):
    """One choice has ended."""

    type: Literal["finish"] = "finish"
    index: int = 0
    reason: FinishReason


class Usage(_Wire):
    prompt_tokens: int
    cached_tokens: int = 0
    skipped_tokens: int = 0
    """Prompt tokens that were left out as of little importance."""
    completion_tokens: int
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    """Tokens that were guessed ahead,"""
    accepted_tokens: int = 0
    """and those of them that held."""


class Timings(_Wire):
    """Seconds, as the engine saw them."""

    queued: float
    prefill: float
    first_token: float
    total: float
    tokens_per_second: float
    """Decode rate of this request: completion tokens after the first, over their time."""


class Done(_Wire):
    """Every choice has ended."""

    type: Literal["done"] = "done"
    usage: Usage
    timings: Timings


class ErrorBody(_Wire):
    code: str
    message: str
    param: str | None = None
    status: int = 500
    retry_after: float | None = None
    """Seconds after which the same request may succeed, where that can be said."""

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
        """The error again, as the class that its code names."""
        return from_code(self.code, self.message, self.param, self.retry_after)


class Failed(_Wire):
    """The request ended in an error; nothing follows."""

    type: Literal["failed"] = "failed"
    error: ErrorBody

    @classmethod
    def of(cls, error: MLXProviderError) -> Failed:
        return cls(error=ErrorBody.of(error))


Event = Annotated[Accepted | Delta | Embedded | Finish | Done | Failed, Field(discriminator="type")]

EVENT_BATCH: TypeAdapter[list[Event]] = TypeAdapter(list[Event])
"""One line of the stream: the events of one engine step for one request."""


class FixedPasses(_Wire):
    """Passes of a reproducible model, whoever is there."""

    rows: int
    """Of each one that decodes, fillers included."""
    tokens: int
    """Of each one of a prompt but the last."""
    cost: float
    """Times that a row alone waits as long for its next token as it would without."""

    @property
    def told(self) -> str:
        """For people."""
        rows = (
            f"rows decode {self.rows} to a pass, filled up ({self.cost:.1f} times the time of one)"
            if self.rows > 1
            else "each row decodes in a pass of its own"
        )
        return f"reproducible: {rows}, prompts run in passes of {self.tokens} tokens"


class ModelStatus(_Wire):
    """One loaded model, as `/v1/models` and `mlx-provider` show it."""

    model: str
    family: str
    plugin: str
    model_type: str
    context_length: int
    kv_layout: str
    mixed_prefill: bool = False
    """Chunks of prompts share the passes of rows that decode."""
    noise_floor: float = 0.0
    drafter: str = ""
    """Who guesses tokens ahead; empty: nobody."""
    """Largest difference of a likely token's log-probability that was measured at load between a
    row in company and alone."""
    reproducible: FixedPasses | None = None
    """The operator has asked for it."""
    vision: bool
    pooling: str | None = None
    """Which states of a text make its vector; `None`: it does not embed."""
    weights_bytes: int
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    notes: list[str] = Field(default_factory=list)

    @property
    def decoding(self) -> str:
        """How its rows decode, for people."""
        if self.reproducible is not None:
            return self.reproducible.told
        return batching(self.kv_layout, self.mixed_prefill, self.noise_floor)


def batching(layout: str, mixed_prefill: bool, noise_floor: float) -> str:
    """How rows of a model decode, for people."""
    if layout == "solo":
        return "rows decode alone"
    chunks = "with" if mixed_prefill else "apart from"
    return (
        f"rows decode together ({layout}), {chunks} chunks of prompts, "
        f"log-probabilities within {noise_floor:.2g} of alone"
    )


class PluginStatus(_Wire):
    """One installed plugin of the engine's process."""

    name: str
    distribution: str
    version: str
    in_use: bool
    conformance: str = ""
    """What `pytest --mlx-conformance` has found of it, and whether that still holds; empty: nobody
    has run that."""


class RankStatus(_Wire):
    """One rank of the group that serves one model over several machines."""

    rank: int
    host: str
    pid: int
    device: str
    state: Literal["serving", "lost"]
    since: float
    """Unix seconds."""
    detail: str = ""
    """Why it is lost."""


NEWER = frozenset({"ranks", "rank_fault"})
"""Fields of `Health` that are left out where they say nothing."""


class Health(_Wire):
    """What `/health` answers: `ok` is false while no engine thread lives."""

    ok: bool
    version: str
    protocol: int = PROTOCOL_VERSION
    pid: int
    device: str
    blas: str
    models: list[ModelStatus] = Field(default_factory=list)
    plugins: list[PluginStatus] = Field(default_factory=list)
    queued: int = 0
    running: int = 0
    active_memory: int = 0
    detail: str = ""
    identity: dict[str, str] = Field(default_factory=dict)
    """Version, Python and settings of the engine process; told to its owner alone."""
    out_of_date: list[str] = Field(default_factory=list)
    """What has changed on disk since it was started, and last what becomes of it."""
    ranks: list[RankStatus] = Field(default_factory=list)
    """Of a model over several machines, rank 0 first."""
    rank_fault: RankStatus | None = None
    """For which the group of ranks was last started again."""

    @model_serializer(mode="wrap")
    def _for_any_client(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """An older client of the same protocol, which knows no ranks, meets none where none are."""
        told: dict[str, Any] = whole(self)
        return {name: told[name] for name in told if told[name] or name not in NEWER}
