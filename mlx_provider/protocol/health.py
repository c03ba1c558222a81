"""An engine's state (`Health`, of `GET /health`) and its live statistics (`Stats`, of `GET
/v1/stats`), without text of prompts or replies. Units: bytes, seconds, tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .events import PROTOCOL_VERSION, Wire

RequestState = Literal["preparing", "queued", "prefill", "decode"]
"""`preparing`: the request's model loads, or its prompt is rendered."""


class _Stats(BaseModel):
    model_config = ConfigDict(frozen=True)  # a reader ignores unknown fields


class RequestStats(_Stats):
    """A request that is in the engine now. Numbers of tokens are as in `events.Usage`."""

    id: str
    model: str  # a Hub id, a path or `demo`, as in the request that loaded it
    state: RequestState
    choices: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0  # of the prompt, computed so far
    completion_tokens: int = 0
    tokens_per_second: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    age: float = 0.0  # since its arrival
    queued: float = 0.0  # from its arrival to its prefill


class LoadingStats(_Stats):  # one stage of the load of a model
    model: str
    what: str  # such as `weights`
    done: int = 0
    total: int = 0  # 0: unknown
    unit: str = ""  # `bytes`, or empty: `done` and `total` count steps

    @property
    def summary(self) -> str:
        """One line for a person."""
        if self.unit:
            return f"{self.model}: {self.what}, {self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB"
        steps = f", step {self.done} of {self.total}" if self.total else ""
        return f"{self.model}: {self.what}{steps}"


class EngineStats(_Stats):
    """One loaded model with its rows. Tokens count since the load, rates over recent seconds."""

    model: str
    kind: str = ""  # options by which its engine differs from others of the model, as `4 bits`
    layout: str  # how its rows decode together, such as `grouped`
    queued: int  # requests
    rows: int  # that are prefilled or decoded
    decoded_per_second: float = 0.0
    prefilled_per_second: float = 0.0
    drafter: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    background_tokens: int = 0  # prefilled while tools ran, for requests to come


class PrefixCacheStats(_Stats):  # of all models together
    entries: int = 0  # stored rows
    nodes: int = 0
    bytes: int = 0
    budget: int = 0  # bytes that it may have
    lookups: int = 0  # so far, as the four that follow
    prompt_tokens: int = 0  # of the looked up prompts
    reused_tokens: int = 0  # of these, found
    restored_tokens: int = 0  # of these, read from disk
    evicted_bytes: int = 0
    disk_bytes: int = 0  # only files that this engine knows
    disk_limit: int = 0  # 0: no disk tier
    hit_rate: float = 0.0  # `reused_tokens / prompt_tokens`


class ModelMemory(_Stats):  # bytes
    model: str
    weights: int
    drafters: int = 0
    rows: int = 0
    features: int = 0  # of images and videos

    def owners(self) -> dict[str, int]:
        """Bytes by field."""
        return self.model_dump(exclude={"model"})


OF_MODELS = tuple(name for name in ModelMemory.model_fields if name != "model")  # uses of memory


class MemoryStats(_Stats):  # bytes
    limit: int = 0  # for all models together
    active: int = 0  # in use by MLX
    pool: int = 0  # free, but not returned to the system by MLX
    prefix_cache: int = 0
    media: int = 0  # images of requests before their prefill
    models: list[ModelMemory] = Field(default_factory=list)

    def owners(self) -> dict[str, int]:
        """Bytes by use: the fields of `ModelMemory`, summed over the models, and our own."""
        found = dict.fromkeys(OF_MODELS, 0)
        for model in self.models:
            for owner, nbytes in model.owners().items():
                found[owner] += nbytes
        return found | {"prefix_cache": self.prefix_cache, "media": self.media, "pool": self.pool}


class Stats(_Stats):
    at: float  # Unix time
    version: str
    device: str
    pid: int
    requests: list[RequestStats] = Field(default_factory=list)
    engines: list[EngineStats] = Field(default_factory=list)
    loading: list[LoadingStats] = Field(default_factory=list)
    prefix_cache: PrefixCacheStats = PrefixCacheStats()
    memory: MemoryStats = MemoryStats()

    def waiting(self) -> int:
        """Number of requests that are not in prefill or decode yet."""
        return sum(request.state in ("preparing", "queued") for request in self.requests)


JOINED = " + "  # between the names of drafters


class FixedPasses(Wire):  # with the option `reproducible`
    rows: int  # of each decode pass, including fillers
    tokens: int  # of each prefill pass except the last of a prompt


class ModelStatus(Wire):
    """A loaded model: what it is, and what the probe chose at its load."""

    model: str
    family: str
    plugin: str  # the one with the family
    model_type: str  # as in the checkpoint's config
    context_length: int
    kv_layout: str  # how its rows decode together, such as `grouped`
    mixed_prefill: bool = False  # prompt chunks share the passes of decoding rows
    noise_floor: float = 0.0
    """Largest difference of a likely token's log-probability in a batch and alone, at load."""
    drafter: str = ""  # names joined by `JOINED`; empty: none
    reproducible: FixedPasses | None = None
    vision: bool
    pooling: str | None = None  # how a text's states become its vector; `None`: cannot embed
    weights_bytes: int
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    notes: list[str] = Field(default_factory=list)  # what a person should know of the load


class PluginStatus(Wire):
    name: str
    distribution: str
    version: str
    in_use: bool  # false: it failed


class Health(Wire):
    """`ok` is false if the engine thread has died: nothing is served any more."""

    ok: bool
    version: str
    protocol: int = PROTOCOL_VERSION
    pid: int
    device: str
    blas: str  # the library that computes on a CPU
    models: list[ModelStatus] = Field(default_factory=list)
    plugins: list[PluginStatus] = Field(default_factory=list)
    queued: int = 0  # requests
    running: int = 0  # rows
    active_memory: int = 0
    detail: str = ""  # what is loaded or measured now, or why it is not `ok`
    identity: dict[str, str] = Field(default_factory=dict)
    """Versions, plugins, Python and settings of the process. Empty on TCP: only for its owner."""
