"""What an engine does now, in figures: never a word of a prompt or a reply.

`GET /v1/figures` answers one `Figures`; with `?stream=SECONDS` a line of JSON that often, until
the engine ends. Bytes, seconds and tokens throughout; `ago` counts back from `Figures.at`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RequestState = Literal["preparing", "queued", "prefill", "decode"]
"""`preparing`: its model loads, or its prompt is rendered."""

MissReason = Literal["", "cold", "diverged", "no_state"]
"""Why the prefix cache had no more of a prompt. Empty: it had all that was ever computed of it;
`cold`: nothing stored begins like it; `diverged`: it leaves what is stored; `no_state`: more was
computed, but a pass cannot go on from there."""


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True)  # a reader takes no offence at what it does not know


class RequestFigures(_Figures):
    """One request that has not ended."""

    id: str
    model: str
    """Name of its folder."""
    state: RequestState
    choices: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, from the prefix cache."""
    prefilled_tokens: int = 0
    """Of the prompt, computed so far."""
    completion_tokens: int = 0
    tokens_per_second: float = 0.0
    """Of its decode, so far."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    age: float = 0.0
    """Since it came."""
    queued: float = 0.0
    """Of that, before its prefill began."""


class StepFigures(_Figures):
    """One step of an engine."""

    ago: float
    seconds: float
    rows: int
    """That decoded."""
    tokens: int
    """That were drawn, and drafts that held."""
    chunk: int
    """Tokens of a prompt; 0: none."""
    mixed: bool
    """The chunk was in the pass of the rows."""


class EngineFigures(_Figures):
    """One engine: the requests of one model that are of one kind."""

    model: str
    kind: str = ""
    layout: str
    mixes: bool
    queued: int
    rows: int
    """That decode or are in prefill."""
    steps: list[StepFigures] = Field(default_factory=list)
    """Of the last seconds, oldest first."""
    step_median: float = 0.0
    """Seconds of those steps, and of the longest of them."""
    step_longest: float = 0.0
    decoded_per_second: float = 0.0
    """Tokens, over those last seconds."""
    prefilled_per_second: float = 0.0
    drafter: str = ""
    drafted_tokens: int = 0
    """Since the model was loaded."""
    accepted_tokens: int = 0
    ahead_tokens: int = 0
    """Prompt tokens that were computed before their request came, while its tools ran."""


class PrefixNode(_Figures):
    """A piece of the tree of stored prefixes."""

    depth: int
    """Pieces above it."""
    start: int
    tokens: int
    bytes: int
    hits: int
    """Rows that were restored through it."""
    resumable: bool
    """A row can go on from its end."""


class Lookup(_Figures):
    """What the prefix cache had of one prompt."""

    request: str
    ago: float
    prompt_tokens: int
    cached_tokens: int
    stored_tokens: int
    """That the closest stored path has in common with it."""
    reason: MissReason


class PrefixCacheFigures(_Figures):
    """The prefix cache of all models."""

    entries: int = 0
    nodes: int = 0
    bytes: int = 0
    budget: int = 0
    lookups: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    restored_tokens: int = 0
    """Of the reused ones, tokens of rows that came from disk."""
    evicted_bytes: int = 0
    disk_bytes: int = 0
    """Of files that this engine knows."""
    disk_limit: int = 0
    """Most bytes on disk; 0: nothing is kept there."""
    hit_rate: float = 0.0
    """Of prompt tokens."""
    tree: list[PrefixNode] = Field(default_factory=list)
    """Parents before their children, what was used last first; not all of a large one."""
    recent: list[Lookup] = Field(default_factory=list)
    """The last lookups, newest first."""


class ModelMemory(_Figures):
    """What one model in memory takes."""

    model: str
    weights: int
    drafters: int = 0
    rows: int = 0
    """Set aside for rows and their passes."""
    features: int = 0
    """Of images seen before."""

    def owners(self) -> dict[str, int]:
        """Bytes by owner."""
        return self.model_dump(exclude={"model"})


OF_MODELS = tuple(name for name in ModelMemory.model_fields if name != "model")


class MemoryFigures(_Figures):
    """Memory by owner."""

    limit: int = 0
    active: int = 0
    """Of the device, in use."""
    pool: int = 0
    """Freed buffers that MLX keeps."""
    prefix_cache: int = 0
    media: int = 0
    """Images on their way to a model."""
    models: list[ModelMemory] = Field(default_factory=list)

    def owners(self) -> dict[str, int]:
        """Bytes by owner, those of all models together."""
        found = dict.fromkeys(OF_MODELS, 0)
        for each in self.models:
            for owner, nbytes in each.owners().items():
                found[owner] += nbytes
        return found | {"prefix_cache": self.prefix_cache, "media": self.media, "pool": self.pool}


class Figures(_Figures):
    """All of it, at one moment; parts of it may be a step apart."""

    at: float
    """Unix time."""
    version: str
    device: str
    pid: int
    requests: list[RequestFigures] = Field(default_factory=list)
    """Oldest first."""
    engines: list[EngineFigures] = Field(default_factory=list)
    prefix_cache: PrefixCacheFigures = PrefixCacheFigures()
    memory: MemoryFigures = MemoryFigures()

    def waiting(self) -> int:
        """Requests whose prefill has not begun."""
        return sum(each.state in ("preparing", "queued") for each in self.requests)
