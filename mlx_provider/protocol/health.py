"""The state of an engine, and its live statistics (`GET /v1/stats`), without text of prompts or
replies. Units: bytes, seconds, tokens. `ago`: seconds before `Stats.at`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .events import PROTOCOL_VERSION, Wire

RequestState = Literal["preparing", "queued", "prefill", "decode"]
"""`preparing`: its model loads, or its prompt is rendered."""


class _Stats(BaseModel):
    model_config = ConfigDict(frozen=True)  # a reader ignores unknown fields


class RequestStats(_Stats):
    id: str
    model: str
    """As in the request that loaded it: a Hub id, a path, `demo`."""
    state: RequestState
    choices: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    completion_tokens: int = 0
    tokens_per_second: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    age: float = 0.0
    queued: float = 0.0


class LoadingStats(_Stats):
    model: str
    what: str
    done: int = 0
    total: int = 0
    """0: unknown."""
    unit: str = ""

    @property
    def summary(self) -> str:
        if self.unit:
            return f"{self.model}: {self.what}, {self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB"
        steps = f", step {self.done} of {self.total}" if self.total else ""
        return f"{self.model}: {self.what}{steps}"


class EngineStats(_Stats):
    model: str
    kind: str = ""
    layout: str
    queued: int
    rows: int
    decoded_per_second: float = 0.0
    prefilled_per_second: float = 0.0
    drafter: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    background_tokens: int = 0
    """Prompt tokens prefilled before their request arrived, while tools ran."""


class PrefixCacheStats(_Stats):
    entries: int = 0
    nodes: int = 0
    bytes: int = 0
    budget: int = 0
    lookups: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    restored_tokens: int = 0
    evicted_bytes: int = 0
    disk_bytes: int = 0
    """Only files that this engine knows."""
    disk_limit: int = 0
    """0: no disk tier."""
    hit_rate: float = 0.0
    """Reused share of prompt tokens."""


class ModelMemory(_Stats):
    model: str
    weights: int
    drafters: int = 0
    rows: int = 0
    features: int = 0

    def owners(self) -> dict[str, int]:
        return self.model_dump(exclude={"model"})


OF_MODELS = tuple(name for name in ModelMemory.model_fields if name != "model")


class MemoryStats(_Stats):
    limit: int = 0
    active: int = 0
    pool: int = 0
    prefix_cache: int = 0
    media: int = 0
    """Images of requests before their prefill."""
    models: list[ModelMemory] = Field(default_factory=list)

    def owners(self) -> dict[str, int]:
        found = dict.fromkeys(OF_MODELS, 0)
        for model in self.models:
            for owner, nbytes in model.owners().items():
                found[owner] += nbytes
        return found | {"prefix_cache": self.prefix_cache, "media": self.media, "pool": self.pool}


class Stats(_Stats):
    at: float
    """Unix time."""
    version: str
    device: str
    pid: int
    requests: list[RequestStats] = Field(default_factory=list)
    engines: list[EngineStats] = Field(default_factory=list)
    loading: list[LoadingStats] = Field(default_factory=list)
    prefix_cache: PrefixCacheStats = PrefixCacheStats()
    memory: MemoryStats = MemoryStats()

    def waiting(self) -> int:
        return sum(request.state in ("preparing", "queued") for request in self.requests)


JOINED = " + "


class FixedPasses(Wire):
    rows: int
    """Rows of each decode pass, including fillers."""
    tokens: int
    """Tokens of each prefill pass except the last of a prompt."""


class ModelStatus(Wire):
    model: str
    family: str
    plugin: str
    model_type: str
    context_length: int
    kv_layout: str
    mixed_prefill: bool = False
    """Prompt chunks share the passes of decoding rows."""
    noise_floor: float = 0.0
    """Largest difference of a likely token's log-probability between a row in a batch and alone,
    measured at load."""
    drafter: str = ""
    """Names joined by `JOINED`; empty: none."""
    reproducible: FixedPasses | None = None
    vision: bool
    pooling: str | None = None
    """How a text's states become its vector; `None`: it does not embed."""
    weights_bytes: int
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    notes: list[str] = Field(default_factory=list)


class PluginStatus(Wire):
    name: str
    distribution: str
    version: str
    in_use: bool


class Health(Wire):
    """`ok` is false while no engine thread runs."""

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
    """What is loaded or measured now, or why it is not `ok`."""
    identity: dict[str, str] = Field(default_factory=dict)
    """Versions, plugins, Python and settings of the process. Only for its owner."""
